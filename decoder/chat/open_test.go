package chat

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// folder creates a folder with files and returns its path.
func folder(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "a [b] *c")
	if filepath.Separator == '\\' {
		dir = filepath.Join(filepath.Dir(dir), "a b c")
	}
	for name, text := range files {
		path := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestOpen(t *testing.T) {
	tool := []json.RawMessage{json.RawMessage(`{}`)}
	const list = `{"chat_template": [{"name": "default", "template": "d{{ bos_token }}"}, {"name": "tool_use", "template": "t{{ eos_token }}"}], "bos_token": "<b>", "eos_token": {"content": "<e>", "lstrip": false}, "pad_token": null, "add_bos_token": true}`
	for _, test := range []struct {
		name  string
		files map[string]string
		in    Conversation
		want  string
		names []string
	}{
		{"a text", map[string]string{"tokenizer_config.json": `{"chat_template": "x{{ bos_token }}{{ pad_token is defined }}{{ add_bos_token is defined }}", "bos_token": "<b>", "pad_token": null, "add_bos_token": true}`}, Conversation{}, "x<b>FalseFalse", []string{"default"}},
		{"a list", map[string]string{"tokenizer_config.json": list}, Conversation{}, "d<b>", []string{"default", "tool_use"}},
		{"a list, with tools", map[string]string{"tokenizer_config.json": list}, Conversation{Tools: tool}, "t<e>", []string{"default", "tool_use"}},
		{"a list, by name", map[string]string{"tokenizer_config.json": list}, Conversation{Template: "default", Tools: tool}, "d<b>", []string{"default", "tool_use"}},
		{"a file before the configuration", map[string]string{"tokenizer_config.json": list, "chat_template.jinja": "f{{ bos_token }}"}, Conversation{}, "f<b>", []string{"default"}},
		{"more files", map[string]string{"chat_template.jinja": "f", "additional_chat_templates/rag.jinja": "r", "additional_chat_templates/a.txt": "{{"}, Conversation{Template: "rag"}, "r", []string{"default", "rag"}},
		{"chat_template.json", map[string]string{"chat_template.json": `{"chat_template": "j"}`, "tokenizer_config.json": `{"chat_template": null}`}, Conversation{}, "j", []string{"default"}},
		{"special_tokens_map.json", map[string]string{"chat_template.jinja": "{{ bos_token }}{{ unk_token }}", "tokenizer_config.json": `{"bos_token": "<b>"}`, "special_tokens_map.json": `{"bos_token": "<x>", "unk_token": {"content": "<u>"}}`}, Conversation{}, "<b><u>", []string{"default"}},
	} {
		templates, err := Open(folder(t, test.files), Options{})
		if err != nil {
			t.Errorf("%s: %v", test.name, err)
			continue
		}
		if got, err := templates.Render(test.in); got != test.want || err != nil || !slices.Equal(templates.Names(), test.names) {
			t.Errorf("%s: %q, %v, %q", test.name, got, err, templates.Names())
		}
	}
	// Options override the files.
	templates, err := Open(folder(t, map[string]string{"tokenizer_config.json": list}), Options{Tokens: map[string]string{"bos_token": "<o>"}})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := templates.Render(Conversation{}); got != "d<o>" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := templates.Render(Conversation{Template: "no"}); !errors.Is(err, ErrNoTemplate) {
		t.Errorf("no template of the name: %v", err)
	}
	for _, test := range []struct {
		files map[string]string
		want  error
		text  string
	}{
		{nil, ErrNoTemplate, "neither"},
		{map[string]string{"tokenizer_config.json": `{}`}, ErrNoTemplate, "neither"},
		{map[string]string{"tokenizer_config.json": `{`}, ErrFormat, "tokenizer_config.json"},
		{map[string]string{"tokenizer_config.json": `{"chat_template": 1}`}, ErrFormat, "neither a text nor a list"},
		{map[string]string{"tokenizer_config.json": `{"chat_template": [{"name": "a"}]}`}, ErrFormat, "entry 0"},
		{map[string]string{"tokenizer_config.json": `{"chat_template": [{"name": "a", "template": ""}, {"name": "a", "template": ""}]}`}, ErrFormat, "two templates"},
		{map[string]string{"chat_template.json": `{}`}, ErrFormat, "has no chat_template"},
		{map[string]string{"chat_template.jinja": `{{`}, ErrSyntax, `"default": line 1, column 1`},
		{map[string]string{"chat_template.jinja": "{# " + strings.Repeat("x", maxFile) + " #}"}, ErrFormat, "bytes"},
	} {
		if _, err := Open(folder(t, test.files), Options{}); !errors.Is(err, test.want) || !strings.Contains(err.Error(), test.text) {
			t.Errorf("%.60q: %v", test.files, err)
		}
	}
}

func TestMessage(t *testing.T) {
	for _, test := range []struct {
		message Message
		want    string
	}{
		{Message{Role: "user", Content: "<x> & é"}, `{"role":"user","content":"<x> & é"}`},
		{Message{Role: "user"}, `{"role":"user","content":""}`},
		{Message{Role: "user", Parts: []json.RawMessage{json.RawMessage(`{"type":"text","text":"a"}`)}}, `{"role":"user","content":[{"type":"text","text":"a"}]}`},
		{Message{Role: "assistant", Reasoning: "r", ToolCalls: []ToolCall{{ID: "1", Name: "f", Arguments: json.RawMessage(`{"b":1,"a":2}`)}}}, `{"role":"assistant","content":"","reasoning_content":"r","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":{"b":1,"a":2}}}]}`},
		{Message{Role: "tool", Content: "4", ToolCallID: "1", Name: "f"}, `{"role":"tool","content":"4","tool_call_id":"1","name":"f"}`},
	} {
		if got, err := encode(test.message); strings.TrimSpace(string(got)) != test.want || err != nil {
			t.Errorf("%s, %v, want %s", got, err, test.want)
		}
	}
	// A decoded message keeps its keys in their order.
	const in = `{"content":null,"weight":0,"tool_calls":[{"function":{"arguments":"{\"a\": 1}","name":"f","x":[{"z":1,"y":null}]},"index":0}],"role":"assistant"}`
	var m Message
	if err := json.Unmarshal([]byte(in), &m); err != nil {
		t.Fatal(err)
	}
	if got, err := encode(m); strings.TrimSpace(string(got)) != in || err != nil || m.Role != "assistant" || m.ToolCalls[0].Name != "f" {
		t.Errorf("%s, %v", got, err)
	}
	// A field that is set replaces the value of its key.
	m.Content, m.ToolCalls, m.Name = "c", nil, "n"
	if got, err := encode(m); strings.TrimSpace(string(got)) != `{"content":"c","weight":0,"tool_calls":null,"role":"assistant","name":"n"}` || err != nil {
		t.Errorf("%s, %v", got, err)
	}
	m = Message{}
	if err := json.Unmarshal([]byte(in), &m); err != nil {
		t.Fatal(err)
	}
	m.ToolCalls[0].ID, m.ToolCalls[0].Name = "7", "g"
	if got, err := encode(m); !strings.Contains(string(got), `[{"function":{"arguments":"{\"a\": 1}","name":"g","x":[{"z":1,"y":null}]},"index":0,"id":"7"}]`) || err != nil {
		t.Errorf("%s, %v", got, err)
	}
	for _, bad := range []string{`[]`, `{"role":1}`, `{"role":"a","role":"b"}`, `{"tool_calls":[1]}`, `{"content":{}}`} {
		if err := json.Unmarshal([]byte(bad), &m); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v", bad, err)
		}
	}
	// Invalid JSON values, and variables with the names of fields.
	for _, c := range []Conversation{
		{Tools: []json.RawMessage{json.RawMessage(`{`)}},
		{Variables: map[string]any{"x": func() {}}},
		{Variables: map[string]any{"x": json.RawMessage(`{"a": 1} 2`)}},
		{Variables: map[string]any{"x": json.RawMessage(strings.Repeat("[", 300) + strings.Repeat("]", 300))}},
		{Variables: map[string]any{"messages": 1}},
		{Messages: []Message{{ToolCalls: []ToolCall{{Name: "f"}}}}},
	} {
		templates, err := New(map[string]string{"default": "x"}, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if out, err := templates.Render(c); !errors.Is(err, ErrFormat) {
			t.Errorf("%+v: %q, %v", c, out, err)
		}
	}
}

// TestNumbers checks that numbers keep the values and the types of the JSON, including integers of more than 64 bits.
func TestNumbers(t *testing.T) {
	templates, err := New(map[string]string{"default": "{{ x | tojson }} {{ x }} {{ x[0] is integer }}{{ x[0] == x[0] }}"}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	const in = `[18446744073709551616, -0, 1.0, 1e5, 1e-7, 1E22, 0.1, 123456789012345680.0, {"b": 1, "a": null}]`
	got, err := templates.Render(Conversation{Variables: map[string]any{"x": json.RawMessage(in)}})
	want := `[18446744073709551616, 0, 1.0, 100000.0, 1e-07, 1e+22, 0.1, 1.2345678901234568e+17, {"b": 1, "a": null}] ` +
		`[18446744073709551616, 0, 1.0, 100000.0, 1e-07, 1e+22, 0.1, 1.2345678901234568e+17, {'b': 1, 'a': None}] TrueTrue`
	if got != want || err != nil {
		t.Errorf("%s, %v\nwant %s", got, err, want)
	}
}
