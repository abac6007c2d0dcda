"""A small writer of line and dot charts as SVG: no dependency, the same bytes for the same figures."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = ("#1f6fb4", "#d1601f", "#2c8a4b", "#8a4fa0", "#806a20", "#b02a4a", "#4a4a4a")
LEFT, RIGHT, TOP, BOTTOM = 64, 230, 48, 50


@dataclass
class Series:
    name: str
    points: list[tuple[float, float]]
    dots: bool = False
    dashed: bool = False


@dataclass
class Chart:
    title: str
    x_label: str
    y_label: str
    series: list[Series]
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[float]
    marks: list[tuple[float, str]] = field(default_factory=list)
    """Vertical lines with a text."""
    size: tuple[int, int] = (940, 400)

    def _x(self, value: float) -> float:
        low, high = self.x_range
        return LEFT + (value - low) / (high - low) * (self.size[0] - LEFT - RIGHT)

    def _y(self, value: float) -> float:
        low, high = self.y_range
        return self.size[1] - BOTTOM - (value - low) / (high - low) * (self.size[1] - TOP - BOTTOM)

    def svg(self) -> str:
        """The whole file."""
        width, height = self.size
        right, bottom = width - RIGHT, height - BOTTOM
        out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
               'font-size="12">', f'<rect width="{width}" height="{height}" fill="#fff"/>',
               text(LEFT, 20, self.title, 'font-size="15" font-weight="bold"')]
        for value in self.y_ticks:
            y = self._y(value)
            out += [line(LEFT, y, right, y, "#ddd"), text(LEFT - 8, y + 4, f"{value:g}", 'text-anchor="end"')]
        for value, name in self.x_ticks:
            out += [line(self._x(value), bottom, self._x(value), bottom + 5, "#555"),
                    text(self._x(value), bottom + 18, name, 'text-anchor="middle"')]
        for value, name in self.marks:
            out += [line(self._x(value), TOP, self._x(value), bottom, "#999", dashed=True),
                    text(self._x(value) + 4, TOP + 12, name, 'fill="#555" font-size="11"')]
        out += [line(LEFT, bottom, right, bottom, "#555"), line(LEFT, TOP, LEFT, bottom, "#555"),
                text((LEFT + right) / 2, height - 10, self.x_label, 'text-anchor="middle"'),
                text(14, TOP - 10, self.y_label)]
        for number, one in enumerate(self.series):
            out += self._series(one, COLOURS[number % len(COLOURS)], right + 14, TOP + 16 + 20 * number)
        return "\n".join([*out, "</svg>", ""])

    def _series(self, one: Series, colour: str, x: float, y: float) -> list[str]:
        points = [(self._x(a), self._y(min(max(b, self.y_range[0]), self.y_range[1]))) for a, b in one.points]
        out = [text(x + 26, y + 4, one.name)]
        if one.dots:
            out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in [*points, (x + 10, y)]]
        if not one.dots or len(points) > 1:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
            dash = ' stroke-dasharray="5 4"' if one.dashed else ""
            out += [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>',
                    line(x, y, x + 20, y, colour, one.dashed)]
        return out


def line(x1: float, y1: float, x2: float, y2: float, colour: str, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dash}/>'


def text(x: float, y: float, words: str, options: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {options}>{escape(words)}</text>'
