"""How numbers are said: sizes, durations and counts, the same in every room."""


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
