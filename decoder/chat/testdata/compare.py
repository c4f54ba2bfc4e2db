"""Renders templates as transformers does, for the tests of package chat.

    python compare.py FOLDER > OUTPUT.json

FOLDER has templates, NAME.jinja. Each is rendered for every conversation of conversations.json, by transformers 5.17's own
function. The clock of strftime_now is fixed. An error of a template is noted as null. Needs transformers and jinja2, no torch.

The golden file is made from the project's own templates:

    python compare.py templates > golden.json

TestFolder compares any other folder, and is skipped without one:

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36    # or the sdist from PyPI, unpacked
    python compare.py llama_cpp_python-0.3.36/vendor/llama.cpp/models/templates > /tmp/golden.json
    LEAN_CHAT_TEMPLATES=llama_cpp_python-0.3.36/vendor/llama.cpp/models/templates LEAN_CHAT_GOLDEN=/tmp/golden.json go test ./decoder/chat
"""

import copy
import datetime
import json
import pathlib
import sys

from transformers.utils import chat_template_utils


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2026, 11, 8, 4, 5, 6)


chat_template_utils.datetime = Clock
here = pathlib.Path(__file__).parent
conversations = json.loads((here / "conversations.json").read_text())
tools = json.loads((here / "tools.json").read_text())
golden = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.jinja")):
    template = path.read_text()
    texts = {}
    for c in conversations:
        try:
            rendered, _ = chat_template_utils.render_jinja_template(
                conversations=[copy.deepcopy(c["messages"])],
                tools=copy.deepcopy({"all": tools, "two": tools[:2]}.get(c.get("tools"))),
                chat_template=template,
                add_generation_prompt=c["add_generation_prompt"],
                bos_token="<s>",
                eos_token="</s>",
                **c.get("variables", {}),
            )
            texts[c["name"]] = rendered[0]
        except Exception as e:
            print(f"{path.name}, {c['name']}: {type(e).__name__}: {str(e)[:120]}", file=sys.stderr)
            texts[c["name"]] = None
    golden[path.name] = texts
json.dump(golden, sys.stdout, ensure_ascii=False, indent=1)
print()
