"""Keeping tokens and passwords out of what is printed or published."""

import re

from huggingface_hub import get_token

HIDDEN = "***"
# Not tokenizer, max_new_tokens or bos_token_id.
SECRET_NAME = r"[\w-]*(?:token(?!s|i[sz]er|_id)|secret|passw|credential|signature|api[_-]?key|access[_-]?key)[\w-]*"
PATTERNS = (
    # What well-known services call their tokens: Hugging Face, OpenAI and its like, GitHub, AWS, Google, Slack.
    (r"(?:hf|api_org)_[A-Za-z0-9]{16,}", HIDDEN),
    (r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}", HIDDEN),
    (r"(?:ghp|gho|ghs|ghu|github_pat)_\w{16,}", HIDDEN),
    (r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w-]{30,}|\bxox[abprs]-[\w-]{8,}", HIDDEN),
    # Weights & Biases, Comet and others: 32 hexadecimal digits or more, which commits have too.
    (r"\b[0-9a-f]{32,}\b", HIDDEN),
    # user:password@host, ?token=..., "api_key": "...", Authorization: Bearer ...
    (r"(://)[^/\s@]+@", rf"\1{HIDDEN}@"),
    (rf"(?i)([?&]{SECRET_NAME}=)[^&\s#\"']+", rf"\1{HIDDEN}"),
    (rf"(?i)\b({SECRET_NAME}[\"']?\s*[=:]\s*[\"']?)(?!\*)[^\s,;\"'|]+", rf"\1{HIDDEN}"),
    (r"(?i)\b(bearer\s+)[^\s,;\"']+", rf"\1{HIDDEN}"),
)


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name holds a token or a password."""
    return re.fullmatch(rf"(?i){SECRET_NAME}", name) is not None


def redacted(text: str) -> str:
    """`text` with *** in place of the Hub's token in use here, and of all that looks like one."""
    token = get_token()
    if token:
        text = text.replace(token, HIDDEN)
    for pattern, replacement in PATTERNS:
        text = re.sub(pattern, replacement, text)
    return text
