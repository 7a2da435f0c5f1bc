"""What the C library (glibc) does with memory that tensors have freed on the CPU."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # malloc.h
# A tensor of more bytes has pages of its own, which go back to the system with it.
LARGE = 4 << 20
PAGES_AT_MOST = 1 << 16  # glibc's own number of such tensors


def _set(option: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None).mallopt(option, value))
    except (AttributeError, OSError, TypeError):  # another C library
        return False


def keep_freed_memory() -> bool:
    """Have the C library keep freed memory for the next tensor instead of giving it back to the system, which would
    have to find and clear each page again. Times then say what a kernel costs, not what a fresh page does.

    What is freed may be a few bytes too short for the next tensor of that size, which is to be aligned, so that memory
    grows for some rounds before it settles.

    Returns:
        Whether the library can (glibc).
    """
    return _set(M_MMAP_MAX, 0) and _set(M_TRIM_THRESHOLD, -1)


def return_freed_memory(above: int = LARGE) -> bool:
    """Have the C library give the memory of every tensor above so many bytes back to the system when it is freed.
    Otherwise what is freed between tensors that stay is kept, in pieces that larger ones do not fit into.

    Returns:
        Whether the library can (glibc).
    """
    return _set(M_MMAP_MAX, PAGES_AT_MOST) and _set(M_MMAP_THRESHOLD, above) and _set(M_TRIM_THRESHOLD, 2 * above)
