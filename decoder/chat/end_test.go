package chat

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
)

func TestEndTokens(t *testing.T) {
	chatml := "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" +
		"{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
	for _, test := range []struct {
		name, template string
		special, want  []string
	}{
		{"between two calls", chatml, []string{"<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<|endoftext|>"}, []string{"<|im_end|>"}},
		{"end and end of text", "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|endoftext|>",
			[]string{"<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"}, []string{"<|end|>", "<|endoftext|>"}},
		{"before the next message alone", "{% for m in messages %}{% if m.role == 'user' %}<s>[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}{{ '' if loop.last else '</s>' }}{% endif %}{% endfor %}",
			[]string{"<s>", "</s>", "[INST]", "[/INST]"}, []string{"</s>"}},
		{"the next message's role", "[start]{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ m.tool_calls[0].function | tojson if m.tool_calls }}{% endfor %}",
			[]string{"[start]", "<|user|>", "<|assistant|>", "<|tool|>"}, []string{"<|user|>", "<|tool|>"}},
		{"another end of calls", "{% for m in messages %}<a>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.x }}<call>{% else %}<return>{% endif %}{% endfor %}",
			[]string{"<a>", "<call>", "<return>", "<retur"}, []string{"<return>", "<call>"}},
		{"parts alone", "{% for m in messages %}{{ m.content[0].text }}<e>{% endfor %}", []string{"<e>", "", "m"}, []string{"<e>"}},
		{"the prompt of the next answer", "{% for m in messages %}<b>{{ m.role }}<think></think>{{ m.content }}<e>{% endfor %}{% if add_generation_prompt or messages[-1].role != 'user' %}<p><think>{% endif %}",
			[]string{"<b>", "<e>", "<p>", "<think>", "</think>"}, []string{"<e>"}},
		{"a prompt that is always there", "{% for m in messages %}<b>{{ m.content }}{{ '<r>' if m.role == 'assistant' }}<e>{% endfor %}<b><think>",
			[]string{"<b>", "<e>", "<r>", "<think>"}, []string{"<r>"}},
		{"a prompt that is always there, and one end", "{% for m in messages %}<b>{{ m.role }}<h>{{ m.content }}<e>{% endfor %}<b>assistant<h>",
			[]string{"<b>", "<e>", "<h>"}, []string{"<e>"}},
		{"the end of reasoning", "{% for m in messages %}<o>{% if m.reasoning_content %}{{ m.reasoning_content }}<c><o>{% endif %}{{ m.content }}<c><e>{% endfor %}",
			[]string{"<o>", "<c>", "<e>"}, []string{"<e>"}},
		{"between arguments", "{% for m in messages %}<o>{{ m.content }}{% for c in m.tool_calls %}{% for k, v in c.function.arguments.items() %}{{ k }}=<q>{{ v }}<q>{% endfor %}{% endfor %}{% if m.role != 'assistant' or m.content %}<e>{% endif %}{% endfor %}",
			[]string{"<o>", "<q>", "<e>"}, []string{"<e>", "<o>"}},
		{"tools are needed", "{% for t in tools %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}<e>{% endfor %}", []string{"<e>"}, []string{"<e>"}},
		{"no special token", chatml, nil, nil},
	} {
		templates, err := New(map[string]string{"default": test.template}, Options{})
		if err != nil {
			t.Fatal(err)
		}
		got, err := templates.EndTokens(test.special)
		if err != nil || !slices.Equal(got, test.want) {
			t.Errorf("%s: %q, %v, want %q", test.name, got, err, test.want)
		}
	}
	templates, err := New(map[string]string{"default": "{{ raise_exception('no') }}"}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	var refused *Exception
	if _, err := templates.EndTokens([]string{"a"}); !errors.As(err, &refused) || refused.Message != "no" {
		t.Errorf("a template that refuses everything: %v", err)
	}
}

// TestEndTokensOfFolder logs the end tokens of the templates of a folder. All words in angle brackets are special tokens.
func TestEndTokensOfFolder(t *testing.T) {
	folder := os.Getenv("LEAN_CHAT_TEMPLATES")
	if folder == "" {
		t.Skip("LEAN_CHAT_TEMPLATES names no templates: see testdata/compare.py")
	}
	files, _ := filepath.Glob(filepath.Join(folder, "*.jinja"))
	none := 0
	for _, file := range files {
		src, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		templates, err := New(map[string]string{"default": string(src)}, Options{Tokens: map[string]string{"bos_token": "<s>", "eos_token": "</s>"}})
		if err != nil {
			t.Error(err)
			continue
		}
		special := append(regexp.MustCompile(`<[|｜][^<>{}' ]+[|｜]>|<\w+:\w+>|<(start|end)_of_turn>|\[e~\[|<turn\|>`).FindAllString(string(src), -1), "<s>", "</s>")
		ends, err := templates.EndTokens(special)
		if err != nil || len(ends) == 0 {
			none++
		}
		t.Logf("%s: %q %v", filepath.Base(file), ends, err)
	}
	t.Logf("%d templates, %d without an end", len(files), none)
}
