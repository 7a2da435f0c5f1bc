"""Learn to act from recorded episodes: a Decision Transformer (Chen et al. 2021, https://arxiv.org/abs/2106.01345; with
minGRU in Feng et al. 2024, https://arxiv.org/abs/2410.01201, section 4.2) whose backbone is a model of this package.

An episode is read as R_1 s_1 a_1 R_2 s_2 a_2 ...: the return that is still to come, the state, the action. The action
is predicted from all before it. In play R_1 is what is asked for, each reward is taken off it, and actions are drawn
with the probabilities that the model gives. The backbone's state is all that is kept of the past: the thousandth step
costs what the first one did, and nothing is cut off.

The episodes are of CartPole, from players of every skill: a good rule that is replaced by chance more or less often.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModel

from hf_recurrent import RecurrentCache
from hf_recurrent.training.model import families

EPILOG = """\
examples:
  python examples/decision.py
  python examples/decision.py --model-type longhorn --asked-for 20 60 200 --output runs/decision.safetensors
"""
ENVIRONMENT, LONGEST = "CartPole-v1", 200  # steps, each of which is rewarded with 1


@dataclass
class Episode:
    """states (T, S), actions (T,), rewards (T,): s_t, then a_t, then what it earned."""

    states: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray

    @property
    def returns_to_go(self) -> np.ndarray:
        return self.rewards[::-1].cumsum()[::-1].copy()


class DecisionModel(nn.Module):
    """
    Args:
        config: of the backbone, whose vocabulary is not used.
        state_size: numbers in a state.
        num_actions: to choose from.
        scale: of returns: they are divided by it.
    """

    def __init__(self, config, state_size: int, num_actions: int, scale: float):
        super().__init__()
        self.backbone, self.scale = AutoModel.from_config(config), scale
        width = config.hidden_size
        self.embed_return, self.embed_state = nn.Linear(1, width), nn.Linear(state_size, width)
        self.embed_action, self.head = nn.Embedding(num_actions, width), nn.Linear(width, num_actions)

    def forward(self, returns: Tensor, states: Tensor, actions: Tensor, mask: Tensor) -> Tensor:
        """
        Args:
            returns: to go, (B, T); states (B, T, S); actions (B, T).
            mask: (B, T), 0 at the padding, which is on the right.

        Returns:
            Logits of each action from what is before it, (B, T, num_actions).
        """
        parts = self._return(returns), self.embed_state(states), self.embed_action(actions)
        embedded = torch.stack(parts, dim=2).flatten(1, 2)  # (B, 3 T, width)
        outputs = self.backbone(
            inputs_embeds=embedded, attention_mask=mask.repeat_interleave(3, dim=1), use_cache=False
        )
        return self.head(outputs.last_hidden_state[:, 1::3])

    def act(self, cache: RecurrentCache, action: Tensor | None, returns: Tensor, states: Tensor) -> Tensor:
        """
        One step of several games at once.

        Args:
            cache: of all before, which goes on with this step.
            action: (B,) the last one, None at the start.
            returns: to go, (B,); states (B, S).

        Returns:
            Logits of the next action, (B, num_actions).
        """
        parts = [] if action is None else [self.embed_action(action)]
        parts += [self._return(returns), self.embed_state(states)]
        outputs = self.backbone(inputs_embeds=torch.stack(parts, dim=1), past_key_values=cache, use_cache=True)
        return self.head(outputs.last_hidden_state[:, -1])

    def _return(self, returns: Tensor) -> Tensor:
        return self.embed_return(returns[..., None] / self.scale)


def rule(state: np.ndarray) -> int:
    """Push to where the pole falls."""
    return int(state[2] + 0.4 * state[3] + 0.05 * state[1] > 0)


def record(episodes: int, seed: int) -> list[Episode]:
    """Episodes of players who follow `rule`, but for a share of steps between a tenth and all of them, that they play
    at random."""
    import gymnasium

    environment, rng = gymnasium.make(ENVIRONMENT, max_episode_steps=LONGEST), np.random.default_rng(seed)
    recorded = []
    for number in range(episodes):
        state, _ = environment.reset(seed=seed * 1_000_003 + number)
        chance, steps, over = rng.uniform(0.1, 1), [], False
        while not over:
            action = int(rng.integers(2)) if rng.random() < chance else rule(state)
            following, reward, lost, stopped, _ = environment.step(action)
            steps.append((state, action, reward))
            state, over = following, lost or stopped
        states, actions, rewards = zip(*steps, strict=True)
        recorded.append(Episode(np.stack(states), np.array(actions), np.array(rewards)))
    environment.close()
    return recorded


def batch(recorded: list[Episode], rng: np.random.Generator, size: int, window: int) -> dict[str, Tensor]:
    """Windows of episodes, from anywhere in them: longer ones come more often."""
    lengths = np.array([len(episode.actions) for episode in recorded])
    rows = []
    for index in rng.choice(len(recorded), size, p=lengths / lengths.sum()):
        episode, first = recorded[index], rng.integers(lengths[index])
        part = slice(first, first + window)
        rows.append((episode.returns_to_go[part], episode.states[part], episode.actions[part]))
    names = ("returns", "states", "actions")
    columns = {
        name: nn.utils.rnn.pad_sequence([torch.from_numpy(np.asarray(row[place])) for row in rows], batch_first=True)
        for place, name in enumerate(names)
    }
    counts = torch.tensor([len(row[2]) for row in rows])
    mask = (torch.arange(columns["actions"].shape[1]) < counts[:, None]).long()
    return {
        "returns": columns["returns"].float(),
        "states": columns["states"],
        "actions": columns["actions"],
        "mask": mask,
    }


@torch.inference_mode()
def play(model: DecisionModel, asked_for: float, games: int, seed: int) -> list[float]:
    """What the model earns in each of `games` where it is asked for a return. The games are played side by side."""
    import gymnasium

    model.eval()
    environments = [gymnasium.make(ENVIRONMENT, max_episode_steps=LONGEST) for _ in range(games)]
    states = np.stack([game.reset(seed=seed * 7_368_787 + k)[0] for k, game in enumerate(environments)])
    earned, over = np.zeros(games), np.zeros(games, bool)
    cache, actions = RecurrentCache(model.backbone.config), None
    generator = torch.Generator().manual_seed(seed)
    while not over.all():
        wanted = torch.from_numpy(np.maximum(asked_for - earned, 1)).float()
        chances = model.act(cache, actions, wanted, torch.from_numpy(states)).softmax(-1)
        actions = torch.multinomial(chances, 1, generator=generator)[:, 0]
        for k, game in enumerate(environments):
            if not over[k]:
                states[k], reward, lost, stopped, _ = game.step(int(actions[k]))
                earned[k] += reward
                over[k] = lost or stopped
    for game in environments:
        game.close()
    return earned.tolist()


def train(
    model: DecisionModel, recorded: list[Episode], steps: int, rate: float, rows: int, window: int, seed: int
) -> float:
    """Returns the mean loss over the last tenth of the steps: nats per action."""
    rng, losses = np.random.default_rng(seed), []
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    model.train()
    with tqdm(total=steps, unit=" steps", disable=None) as bar:
        for _ in range(steps):
            examples = batch(recorded, rng, rows, window)
            kept = examples["mask"].bool()
            loss = F.cross_entropy(model(**examples)[kept], examples["actions"][kept])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            bar.update()
    return float(np.mean(losses[-max(1, steps // 10) :]))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-type", default="mingru", choices=list(families()), help="family of the backbone")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=400, help="to learn from (%(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="of training (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument(
        "--window", type=int, default=30, help="steps of an episode that are read at once (%(default)s)"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--asked-for", type=float, nargs="+", default=[20, 60, 200], help="returns (%(default)s)")
    parser.add_argument("--games", type=int, default=20, help="to play for each of these (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="file to save the weights in, .safetensors")
    args = parser.parse_args(argv)
    for name in ("hidden_size", "layers", "episodes", "steps", "batch_size", "window", "games"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if not 0 < args.learning_rate < np.inf:
        parser.error(f"--learning-rate must be a number above 0, got {args.learning_rate}")
    if args.output is not None and (args.output.suffix != ".safetensors" or not args.output.parent.is_dir()):
        parser.error(f"--output {args.output}: expected a name ending in .safetensors, in a folder that exists")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    try:
        import gymnasium  # noqa: F401
    except ModuleNotFoundError:
        sys.exit("decision.py: error: it needs gymnasium: pip install gymnasium")
    recorded = record(args.episodes, args.seed)
    earned = np.array([episode.rewards.sum() for episode in recorded])
    what = f"{len(recorded)} episodes, {int(earned.sum()):,} steps"
    print(f"Recorded: {what}, {earned.mean():.1f} ± {earned.std():.1f} earned", flush=True)
    torch.manual_seed(args.seed)
    config = families()[args.model_type](
        hidden_size=args.hidden_size, num_hidden_layers=args.layers, vocab_size=1, use_cache=False
    )
    model = DecisionModel(config, recorded[0].states.shape[1], 2, LONGEST)
    loss = train(model, recorded, args.steps, args.learning_rate, args.batch_size, args.window, args.seed)
    if not np.isfinite(loss):
        sys.exit(f"decision.py: error: the loss is {loss}: try a smaller --learning-rate")
    print(f"Trained: {sum(p.numel() for p in model.parameters()):,} parameters, loss {loss:.4f} nats per action")
    for asked in args.asked_for:
        got = np.array(play(model, asked, args.games, args.seed))
        print(f"Asked for {asked:g}: {got.mean():.1f} ± {got.std():.1f} in {args.games} games")
    if args.output is not None:
        from safetensors.torch import save_model

        save_model(model, args.output)
        print(f"Written: {args.output}")


if __name__ == "__main__":
    main()
