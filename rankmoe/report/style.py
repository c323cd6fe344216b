"""The page's style sheet."""

from __future__ import annotations

from rankmoe.report.theme import FONT, HEAT, figure_rules, variables

_RULES = f"""
* {{ box-sizing: border-box; }}
html {{ color-scheme: light dark; -webkit-text-size-adjust: 100%; }}
body {{ margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 {FONT}; }}
main, header, footer {{ max-width: 1240px; margin: 0 auto; padding: 0 20px; }}
header {{ padding-top: 36px; }}
h1 {{ font-size: 28px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }}
h2 {{ font-size: 21px; line-height: 1.3; margin: 52px 0 6px; }}
h3 {{ font-size: 16px; line-height: 1.4; margin: 26px 0 10px; overflow-wrap: anywhere; }}
p {{ margin: 6px 0 12px; max-width: 76ch; overflow-wrap: anywhere; }}
.muted, figcaption, footer {{ color: var(--muted); font-size: 13px; }}
a {{ color: var(--native); text-underline-offset: 3px; }}
nav {{ display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 14px 0 0; font-size: 15px; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px; margin: 22px 0 0; }}
.tile {{ display: flex; flex-direction: column-reverse; justify-content: flex-end; }}
.tile, figure {{ background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }}
.tile {{ padding: 12px 16px 14px; }}
.tile dd {{ margin: 0; font-size: 26px; font-weight: 650; line-height: 1.25; font-variant-numeric: tabular-nums; }}
.tile dt {{ color: var(--muted); font-size: 14px; line-height: 1.4; }}
figure {{ margin: 0 0 14px; padding: 6px; }}
figcaption {{ padding: 2px 12px 8px; overflow-wrap: anywhere; }}
.panels {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); }}
.panels svg {{ display: block; width: 100%; height: auto; max-width: 440px; }}
.pair .panels svg {{ max-width: 520px; }}
.pair {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 0 20px; }}
article {{ min-width: 0; }}
.scroll {{ overflow-x: auto; border: 1px solid var(--rule); border-radius: 10px; background: var(--card); }}
.scroll:focus-visible, a:focus-visible, summary:focus-visible {{ outline: 2px solid var(--native); }}
table {{ border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 4px 12px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }}
tr:last-child > * {{ border-bottom: 0; }}
thead th {{ color: var(--muted); font-weight: 600; padding: 8px 12px; }}
th:first-child {{ text-align: left; position: sticky; left: 0; background: var(--card); }}
tbody th {{ font-weight: 400; }}
td.words, th.words {{ text-align: left; }}
tr.main > * {{ font-weight: 650; }}
tr.ratio > * {{ color: var(--muted); }}
.coverage td, .coverage thead th:not(:first-child) {{ text-align: center; padding: 5px 4px; }}
.swatch {{ display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 8px; }}
.swatch {{ background: currentColor; }}
.legend, .sources ul {{ list-style: none; display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 0; margin: 10px 0; }}
.legend li, .sources li {{ font-size: 14px; }}
.heat {{ display: inline-block; width: 14px; height: 14px; border-radius: 3px; margin-right: 6px; }}
.heat {{ vertical-align: -2px; }}
.pill {{ display: inline-block; padding: 0 8px; border-radius: 99px; border: 1px solid; font-size: 12.5px; }}
.heuristic {{ color: var(--muted); border-style: dashed; }}
.shipped, .user-cache, .explicit {{ color: var(--good); font-weight: 600; }}
details {{ margin: 10px 0; }}
summary {{ cursor: pointer; padding: 4px 0; font-size: 14px; }}
footer {{ padding-top: 28px; padding-bottom: 48px; }}
@media (max-width: 560px) {{
  main, header, footer {{ padding-left: 12px; padding-right: 12px; }}
  .tiles {{ grid-template-columns: 1fr 1fr; }}
  figure {{ padding: 2px; }}
  table {{ font-size: 13px; }}
  th, td, thead th {{ padding: 4px 8px; }}
  th:first-child {{ white-space: normal; min-width: 160px; }}
}}
"""


def style_sheet() -> str:
    """All rules, both themes."""
    steps = "".join(f".step-{step} {{ background: var(--{name}); }}\n" for step, name in enumerate(HEAT))
    light, dark = variables("light"), variables("dark")
    themes = f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    return themes + _RULES + figure_rules() + steps
