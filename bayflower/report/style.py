"""The style sheet of the report: wide and narrow screens, light, dark and paper.

A table of the class `cards` becomes one card a row on a narrow screen: every cell carries the
heading of its column in `data-label`. What is still too wide scrolls in its own box, which shows a
shadow on the side that goes on.
"""

from __future__ import annotations

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart; lighter ones
# on a dark page.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#e69f00", "#333333")
DARK = ("#56b4e9", "#ff8c42", "#2fd6a3", "#f0a6cc", "#f0e442", "#8fd0ff", "#ffb733", "#dddddd")
STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1c1c1c; --soft: #5c5c5c;
  --line: #d9d9d9; --card: #fafafa; --lead: #eef4f9; --shade: #00000040; COLOURS_LIGHT }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181c; --ink: #ececec; --soft: #a9adb5; --line: #3a3e46; --card: #1e2126;
    --lead: #1b2631; --shade: #00000090; COLOURS_DARK } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); overflow-wrap: break-word;
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 1.4rem; line-height: 1.3; margin: 40px 0 8px; }
h3 { font-size: 1.15rem; margin: 36px 0 10px; }
h4 { font-size: 1rem; line-height: 1.35; margin: 0 0 8px; } section > h4 { margin-top: 24px; }
p, li, dd { max-width: 80ch; }
.soft, figcaption { color: var(--soft); font-size: 0.875rem; }
nav ul { display: flex; flex-wrap: wrap; gap: 4px 16px; list-style: none; padding: 0;
  margin: 8px 0; }
nav summary { cursor: pointer; }
a { color: var(--c0); }
.verdict { background: var(--lead); border: 1px solid var(--line); border-left: 5px solid var(--c0);
  border-radius: 8px; padding: 16px 20px; }
.verdict .answer { font-size: 1.3rem; line-height: 1.35; font-weight: 600; margin: 0 0 12px; }
.verdict dl { margin: 0; display: grid; grid-template-columns: 11rem minmax(0, 1fr);
  gap: 10px 20px; }
.verdict dt { font-weight: 600; } .verdict dd { margin: 0; }
.verdict ul { margin: 0; padding-left: 1.1rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr));
  gap: 16px; align-items: start; margin: 12px 0; }
figure { margin: 0; padding: 12px; border: 1px solid var(--line); border-radius: 8px;
  background: var(--card); break-inside: avoid; min-width: 0; }
figure.wide { grid-column: 1 / -1; } figure.wide .scroll > svg { min-width: 640px; }
figure svg { width: 100%; height: auto; display: block; }
figure:not(.wide) .scroll > svg { max-width: 560px; margin: 0 auto; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; list-style: none; padding: 0;
  margin: 8px 0 0; font-size: 0.875rem; }
.legend li { display: flex; align-items: center; gap: 6px; min-width: 0; }
.legend svg { width: 32px; height: 16px; flex: none; }
.scroll { overflow-x: auto;
  background:
    linear-gradient(90deg, var(--under) 30%, transparent) left / 40px 100% no-repeat local,
    linear-gradient(270deg, var(--under) 30%, transparent) right / 40px 100% no-repeat local,
    radial-gradient(farthest-side at 0 50%, var(--shade), transparent) left / 12px 100% no-repeat,
    radial-gradient(farthest-side at 100% 50%, var(--shade), transparent) right / 12px 100%
    no-repeat; --under: var(--page); }
figure .scroll { --under: var(--card); }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 9px; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th { font-weight: 600; white-space: normal; vertical-align: bottom; }
td:first-child, .left td { white-space: normal; min-width: 7rem; }
th:first-child, td:first-child, .left td, .left th { text-align: left; }
td.best { font-weight: 700; }
.matrix td { text-align: center; min-width: 5rem; white-space: normal; }
.matrix th { vertical-align: middle; } .matrix tbody th { text-align: left; }
.matrix td.right { background: color-mix(in srgb, var(--c2) 22%, transparent); }
.matrix td.wrong { background: color-mix(in srgb, var(--c1) 18%, transparent); }
.matrix b { font-size: 1.1rem; display: block; }
.glossary { display: grid; grid-template-columns: 12rem minmax(0, 1fr); gap: 6px 20px;
  font-size: 0.9375rem; }
.glossary dt { font-weight: 600; } .glossary dd { margin: 0; }
svg text { fill: var(--ink); font-size: 12px; font-family: inherit; }
svg .title { font-size: 12.5px; }
svg .tick { fill: var(--soft); font-size: 11.5px; } svg .name { font-size: 12px;
  paint-order: stroke; stroke: var(--card); stroke-width: 3px; }
svg .grid { stroke: var(--line); stroke-width: 1; } svg .axis { fill: none; stroke: var(--soft); }
svg .rule { stroke: var(--soft); stroke-width: 1.2; }
svg .line { fill: none; stroke-width: 2; }
svg .glyph { font-size: 11px; font-weight: 600; }
svg .band { stroke: none; opacity: 0.18; }
svg .mark { stroke: var(--page); stroke-width: 0.6; }
svg .bar { opacity: 0.75; }
svg .box { opacity: 0.45; }
svg .bubble { opacity: 0.7; }
SERIES
@media screen and (max-width: 900px) {
  main { padding: 16px 12px 48px; } h1 { font-size: 1.4rem; }
  .verdict { padding: 14px; } .verdict .answer { font-size: 1.15rem; }
  .verdict dl, .glossary { display: block; } .verdict dd, .glossary dd { margin: 0 0 12px; }
  table.cards, table.cards tbody, table.cards tr, table.cards td { display: block; width: 100%; }
  table.cards thead { display: none; }
  table.cards tr { border: 1px solid var(--line); border-radius: 8px; background: var(--card);
    padding: 8px 12px; margin: 0 0 12px; }
  table.cards td { display: flex; justify-content: space-between; gap: 16px; padding: 4px 0;
    border: 0; text-align: right; white-space: normal; overflow-wrap: anywhere; min-width: 0; }
  table.cards td::before { content: attr(data-label); color: var(--soft); text-align: left;
    flex: 0 1 auto; }
  table.cards td:first-child { display: block; text-align: left; font-weight: 600;
    border-bottom: 1px solid var(--line); margin-bottom: 4px; padding-bottom: 6px; }
  table.cards td:first-child::before, table.cards td:empty { display: none; }
  .matrix { width: 100%; } .matrix td, .matrix th { padding: 6px 5px; min-width: 0; }
  figure.wide::before { content: "wider than this screen: scroll it sideways"; display: block;
    color: var(--soft); font-size: 0.8125rem; }
}
@media print {
  @page { size: A4; margin: 14mm; }
  :root { color-scheme: light; --page: #fff; --ink: #000; --soft: #444; --line: #bbb; --card: #fff;
    --lead: #f3f3f3; --shade: transparent; COLOURS_LIGHT }
  body { font-size: 9pt; line-height: 1.4; } main { max-width: none; padding: 0; }
  nav { display: none; } h2, h3, h4 { break-after: avoid; } h3 { margin-top: 20px; }
  .scroll { overflow: visible; background: none; } figure.wide .scroll > svg { min-width: 0; }
  .figures { grid-template-columns: 1fr 1fr; gap: 10px; }
  .verdict, .matrix td { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .verdict dl { grid-template-columns: 8rem minmax(0, 1fr); }
  h1 { font-size: 16pt; } h2 { font-size: 13pt; margin-top: 16px; } h3 { font-size: 11pt; }
  .verdict .answer { font-size: 13pt; } .verdict dl { row-gap: 5px; }
  .legend, .soft, figcaption { font-size: 8pt; } .glossary { font-size: 8.5pt; row-gap: 2px; }
  table { font-size: 7.5pt; } th, td { padding: 3px; } .left td { white-space: normal; }
  td:first-child, .left td { min-width: 0; }
  thead { display: table-header-group; } tr, dd { break-inside: avoid; }
  a { color: inherit; text-decoration: none; } }
"""


def style() -> str:
    """Return the style sheet."""
    text = STYLE
    for name, colours in (("COLOURS_LIGHT", LIGHT), ("COLOURS_DARK", DARK)):
        text = text.replace(
            name, " ".join(f"--c{i}: {colour};" for i, colour in enumerate(colours))
        )
    rules = [
        f"svg .line.s{i} {{ stroke: var(--c{i}); }} svg :is(.mark, .bar, .box, .bubble, .band, "
        f".glyph).s{i} {{ fill: var(--c{i}); }}"
        for i in range(len(LIGHT))
    ]
    return text.replace("SERIES", "\n".join(rules))
