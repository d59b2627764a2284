"""How numbers are said: sizes, durations and counts, the same in every room; and how a size is read."""


def format_bytes(num_bytes: float) -> str:
    """Format a size with a binary unit: 40960 is «40.0 KiB»."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024 or unit == "TiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"


def format_duration(seconds: float) -> str:
    """«40 s», «12 min», «3 h 05 min»."""
    if seconds < 99.5:
        return f"{max(seconds, 0):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60:,} h {minutes % 60:02} min"


def format_count(count: int, noun: str) -> str:
    """«1 worker», «1,000 workers»."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def parse_size(text: str | None) -> int | None:
    """Bytes of «2TB», «500 GiB» or «1e9»; None stays. Raises ValueError, KeyError or OverflowError for anything else."""
    if text is None:
        return None
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGTP", start=1):
        units |= {f"{letter}B": 1000**power, f"{letter}IB": 1024**power, letter: 1000**power}
    spelled = text.strip().upper()
    number = spelled.rstrip("KMGTPIB ")
    size = float(number) * units[spelled[len(number) :].strip()]
    if not 0 < size < 2**63:
        raise ValueError(text)
    return int(size)
