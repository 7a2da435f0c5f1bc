"""What only a GPU can show: that the kernels run there, in models, programs and graphs, and give what the CPU gives.

Every kernel on many shapes is benchmarks/gpu_check.py's; these tests are of what stands on top of them.
"""

import copy
import threading

import pytest
import torch
from families import causal_lm, each_family

from hf_recurrent import StaticRecurrentCache
from hf_recurrent.scan import backend_report, linear_scan, mingru_scan
from hf_recurrent.scan.ops import choose_backend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FORWARD = {"rtol": 1e-3, "atol": 1e-4}  # logits of float32 models beside float64's


@pytest.fixture(autouse=True)
def full_precision():
    """Matrix products in float32, not in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def pair(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.rand(*shape, device="cuda").to(dtype), torch.randn(*shape, device="cuda").to(dtype)]


def expected(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return linear_scan(a.double().cpu(), b.double().cpu(), backend="reference")[0]


def test_the_kernels_are_what_runs():
    assert backend_report()["cuda"] == "available"
    assert choose_backend(None, torch.device("cuda", 0)) == "cuda"


@each_family
def test_a_model_says_what_it_says_on_a_cpu(config):
    exact = causal_lm(config)
    model = copy.deepcopy(exact).to("cuda", torch.float32)
    ids = torch.randint(config.vocab_size, (3, 33))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    labels = ids.masked_fill(mask == 0, -100)
    want = exact(input_ids=ids, attention_mask=mask, labels=labels)
    got = model(input_ids=ids.cuda(), attention_mask=mask.cuda(), labels=labels.cuda())
    here = mask.bool()
    torch.testing.assert_close(got.logits.double().cpu()[here], want.logits[here], **FORWARD)
    want.loss.backward()
    got.loss.backward()
    for (name, parameter), theirs in zip(exact.named_parameters(), model.parameters(), strict=True):
        scale = parameter.grad.abs().max().item() + 1e-3
        error = (theirs.grad.double().cpu() - parameter.grad).abs().max().item()
        assert error < 2e-3 * scale, f"{name}: off by {error}, largest {scale}"


@each_family
def test_generate(config):
    exact = causal_lm(config)
    model = copy.deepcopy(exact).to("cuda", torch.float32)
    ids = torch.randint(config.vocab_size, (2, 9))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert model.generate(ids.cuda(), **options).tolist() == exact.generate(ids, **options).tolist()


@each_family
def test_one_token_in_a_graph(config):
    """Captured once and replayed on other tokens: the state is at the same address, and nothing is read on the host."""
    exact = causal_lm(config)
    model = copy.deepcopy(exact).to("cuda", torch.float32)
    ids = torch.randint(config.vocab_size, (2, 12))
    with torch.no_grad():
        want = exact(input_ids=ids).logits
        cache, token = StaticRecurrentCache(model.config), torch.zeros(2, 1, dtype=torch.long, device="cuda")
        model(input_ids=ids[:, :3].cuda(), past_key_values=cache)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # the first calls allocate
            token.copy_(ids[:, 3:4])
            model(input_ids=token, past_key_values=cache)
            token.copy_(ids[:, 4:5])
            model(input_ids=token, past_key_values=cache)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(input_ids=token, past_key_values=cache).logits
        for t in range(5, 12):
            token.copy_(ids[:, t : t + 1])
            graph.replay()
            torch.testing.assert_close(logits[:, 0].double().cpu(), want[:, t], **FORWARD)


@each_family
def test_compiled(config):
    exact = causal_lm(config)
    model = torch.compile(copy.deepcopy(exact).to("cuda", torch.float32), fullgraph=True)
    ids = torch.randint(config.vocab_size, (2, 21))
    with torch.no_grad():
        torch.testing.assert_close(
            model(input_ids=ids.cuda(), use_cache=False).logits.double().cpu(), exact(input_ids=ids).logits, **FORWARD
        )


def test_a_stream_of_ones_own():
    """Kernels go to PyTorch's current stream: behind what is queued there, and not before."""
    a, b = pair(2, 500, 64)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        later = b * 2
        h = linear_scan(a, later)[0]
    stream.synchronize()
    torch.testing.assert_close(h.double().cpu(), expected(a, 2 * b), rtol=1e-5, atol=1e-4)


def test_threads_of_their_own():
    """A thread that has not touched the GPU before, as a data loader's or a server's."""
    a, b = pair(2, 300, 40)
    found = []
    threads = [threading.Thread(target=lambda: found.append(linear_scan(a, b)[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(torch.equal(h, found[0]) for h in found)


@pytest.mark.parametrize("shape", [(1, 5000, 64), (8, 200, 1024)], ids=["in segments", "in one"])
def test_a_captured_training_step(shape):
    gate, hidden = (torch.randn(*shape, device="cuda", requires_grad=True) for _ in "gh")
    grad = torch.randn(*shape, device="cuda")

    def step():
        return torch.autograd.grad(mingru_scan(hidden, gate)[0], (hidden, gate), grad)

    want = [x.clone() for x in step()]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for _ in range(3):
        for x in got:
            x.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_more_than_two_billion_elements():
    """Offsets are 64-bit: the last rows lie beyond 2^31 elements."""
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free memory")
    shape = (3, 2**20, 768)
    a = torch.full(shape, 0.5, dtype=torch.bfloat16, device="cuda")
    b = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    b[2, -200:] = torch.randn(200, 768, device="cuda").bfloat16()
    h, final = linear_scan(a, b)
    want = expected(a[2:, -200:], b[2:, -200:])
    torch.testing.assert_close(h[2:, -200:].double().cpu(), want, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(final[2].double().cpu(), want[0, -1], rtol=1e-5, atol=1e-5)
    assert not h[:2].any()
