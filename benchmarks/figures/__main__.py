"""Draws the documentation's figures, light and dark: docs/figures/*.svg; fills docs/papers*.md.

    python benchmarks figures

Charts are of what was measured (`measured`), drawings of plans and rules (`drawings`,
`divisions`), `papers_page` is of what papers.py measured.
"""

from . import drawings, measured, papers_page


def main() -> None:
    """Draws every figure."""
    record = measured.newest(measured.RESULTS)
    sparse = measured.newest(measured.RESULTS, measured.SPARSE_COMMAND)
    folder = measured.ROOT / "docs" / "figures"
    folder.mkdir(exist_ok=True)
    for theme, color in measured.THEMES.items():
        measured.draw_speed(record, color, folder / f"speed-{theme}.svg")
        measured.draw_gain(record, color, folder / f"gain-{theme}.svg")
        measured.draw_sparse(sparse, color, folder / f"sparse-{theme}.svg")
        for name in drawings.DRAWINGS:
            (folder / f"{name}-{theme}.svg").write_text(drawings.draw(name, theme))
    runs = papers_page.runs_of()
    papers_page.draw(runs, folder)
    for page in papers_page.PAGES:
        page.write_text(papers_page.fill(page.stem, page.read_text(), runs))


if __name__ == "__main__":
    main()
