"""Renders the templates of rules.json by transformers 5.17's own function, and writes their texts there: null for an error.

    python rules.py              # renders the templates that rules.json has
    python rules.py FILE...      # adds templates first: one a line

Needs transformers and jinja2, no torch.
"""

import json
import pathlib
import sys

from transformers.utils.chat_template_utils import render_jinja_template

path = pathlib.Path(__file__).parent / "rules.json"
templates = [template for template, _ in json.loads(path.read_text())] if path.exists() else []
for name in sys.argv[1:]:
    templates += pathlib.Path(name).read_text().splitlines()


def render(template):
    try:
        (text,), _ = render_jinja_template(conversations=[[{"role": "user", "content": "Hi"}]], chat_template=template)
        return text
    except Exception:
        return None


lines = [json.dumps([template, render(template)]) for template in dict.fromkeys(templates)]
path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
