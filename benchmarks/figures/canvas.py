"""Owns the SVG that drawings are made of, and its colours by theme."""

import math
from collections.abc import Iterable

# Colours of what is drawn on no background of its own, by theme.
THEMES = {
    "light": {"text": "#24292f", "weak": "#57606a", "none": "#e9ecef", "line": "#868e96"},
    "dark": {"text": "#e6edf3", "weak": "#a5adb6", "none": "#30363d", "line": "#868e96"},
}
# The same in both themes, under white text.
BLUE, GREEN, ORANGE, VIOLET, GREY = "#1c6dd0", "#2b8a3e", "#d9480f", "#7048e8", "#697079"
PALE = "#74a9e6"  # tested element by element
PARTS = (BLUE, ORANGE, GREEN, VIOLET, "#0b7285", "#a61e4d", "#7c5e10", "#495057")


class Canvas:
    """An SVG in the making: positions in pixels, y downwards."""

    def __init__(self, title: str, width: int, height: int, theme: str):
        self.colors = THEMES[theme]
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif" font-size="12">',
            f"<title>{title}</title>",
        ]

    def color(self, name: str) -> str:
        return self.colors.get(name, name)

    def rect(self, x: float, y: float, w: float, h: float, fill: str, *, stroke: str = "") -> None:
        edge = f' stroke="{self.color(stroke)}" stroke-width="2"' if stroke else ""
        self.parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}" rx="2" '
            f'fill="{self.color(fill)}"{edge}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        fill: str = "text",
        anchor: str = "start",
        size: int = 12,
        bold: bool = False,
    ) -> None:
        style = "" if anchor == "start" else f' text-anchor="{anchor}"'
        style += "" if size == 12 else f' font-size="{size}"'
        style += ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" fill="{self.color(fill)}"{style}>{words}</text>'
        )

    def box(self, x: float, y: float, w: float, h: float, fill: str, words: str = "") -> None:
        """Draws a rectangle with white words in it, where they fit."""
        self.rect(x, y, w, h, fill)
        if words and w >= 6 * len(words):
            size = 11 if w >= 8 * len(words) else 9
            self.text(x + w / 2, y + h / 2 + 4, words, fill="#fff", anchor="middle", size=size)

    def line(self, x0: float, y0: float, x1: float, y1: float, *, color: str = "line") -> None:
        self.parts.append(
            f'<line x1="{_n(x0)}" y1="{_n(y0)}" x2="{_n(x1)}" y2="{_n(y1)}" '
            f'stroke="{self.color(color)}" stroke-width="1.5"/>'
        )

    def arrow(self, x0: float, y0: float, x1: float, y1: float, *, color: str = "line") -> None:
        self.line(x0, y0, x1, y1, color=color)
        length = math.hypot(x1 - x0, y1 - y0)
        dx, dy = (x1 - x0) / length, (y1 - y0) / length
        points = [(x1, y1)]
        points += [(x1 - 7 * dx - 4 * s * dy, y1 - 7 * dy + 4 * s * dx) for s in (1, -1)]
        listed = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self.parts.append(f'<polygon points="{listed}" fill="{self.color(color)}"/>')

    def legend(self, x: float, y: float, entries: Iterable[tuple[str, str]]) -> None:
        for fill, words in entries:
            self.rect(x, y - 10, 12, 12, fill)
            self.text(x + 18, y, words, fill="weak")
            x += 40 + 6.6 * len(words)

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def _n(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")
