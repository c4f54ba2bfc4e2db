package chat

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"unicode"
)

// TestFindCalls: calls are found in the forms of Hermes and Qwen, Mistral and Llama.
func TestFindCalls(t *testing.T) {
	tools := []json.RawMessage{json.RawMessage(`{"type": "function", "function": {"name": "king"}}`), json.RawMessage(`{"name": "girl"}`), json.RawMessage(`3`)}
	const king, girl = `king {"a": 1}`, `girl {"b": "{"}`
	for _, c := range []struct {
		answer, before string
		calls          []string
	}{
		{"", "", nil},
		{"No call {", "", nil},
		{"{\"name\": \"king\"}", "", nil},
		{"{\"name\": \"dog\", \"arguments\": {}}", "", nil},
		{"{\"name\": 3, \"arguments\": {}}", "", nil},
		{"{\"name\": \"king\", \"arguments\": [1]}", "", nil},
		{"{\"name\": \"king\", \"arguments\": {\"a\": 1}", "", nil},
		{"{\"name\": \"king\", \"arguments\": \"\"}", "", nil},
		{`{"name": "king", "arguments": {"a": 1}}`, "", []string{king}},
		{`<|python_tag|>{"name": "king", "parameters": {"a": 1}}<|eom_id|>`, "", []string{king}},
		{`{"name": "king", "arguments": "{\"a\": 1}"}`, "", []string{king}},
		{`{"type": "function", "function": {"name": "king", "arguments": {"a": 1}}}`, "", nil}, // something is around the call
		{"I ask {x}.\n<tool_call>\n" + `{"name": "king", "arguments": {"a": 1}}` + "\n</tool_call>\n", "I ask {x}.", []string{king}},
		{"<tool_call>\n" + `{"name": "king", "arguments": {"a": 1}}` + "\n</tool_call>\n<tool_call>\n" + `{"name": "girl", "arguments": {"b": "{"}}` + "\n</tool_call>", "", []string{king, girl}},
		{`Well [TOOL_CALLS] [{"name": "king", "arguments": {"a": 1}}, {"name": "girl", "arguments": {"b": "{"}}]</s>`, "Well", []string{king, girl}},
		{`<a><b>{"name": "king", "parameters": {"a": 1}}; {"name": "girl", "parameters": {"b": "{"}}</b></a>`, "", []string{king, girl}},
		{`{"name": "king", "arguments": {"a": 1}} and then`, "", nil},
		{`{"name": "king", "arguments": {"a": 1}} or {"name": "girl", "arguments": {"b": 1}}`, "", nil},
	} {
		before, calls := FindCalls(c.answer, tools)
		ok := calls != nil
		var got []string
		for _, call := range calls {
			got = append(got, call.Name+" "+string(call.Arguments))
		}
		if ok != (c.calls != nil) || ok && (before != c.before || !slices.Equal(got, c.calls)) {
			t.Errorf("%q: %q, %q, %v, want %q, %q", c.answer, before, got, ok, c.before, c.calls)
		}
	}
}

// FuzzFindCalls: calls have names of tools, and arguments that are objects.
func FuzzFindCalls(f *testing.F) {
	f.Add("Well [TOOL_CALLS] [{\"name\": \"king\", \"arguments\": {\"a\": 1}}, {\"name\": \"girl\", \"parameters\": \"{}\"}]</s>")
	f.Add("<tool_call>\n{\"name\": \"king\", \"arguments\": {\"a\": {}}}\n</tool_call>{{{")
	tools := []json.RawMessage{json.RawMessage(`{"name": "king"}`), json.RawMessage(`{"name": "girl"}`)}
	f.Fuzz(func(t *testing.T, answer string) {
		before, calls := FindCalls(answer, tools)
		ok := calls != nil
		if ok && (len(calls) == 0 || !strings.HasPrefix(strings.TrimSpace(answer), before)) {
			t.Errorf("%q before %d calls", before, len(calls))
		}
		if ok {
			// What a stream shows is before the calls.
			leading := len(answer) - len(strings.TrimLeftFunc(answer, unicode.IsSpace))
			for n := range len(answer) + 1 {
				if shown := CallsFrom(answer[:n]); shown > leading+len(before) {
					t.Errorf("%d bytes of %q are shown, and %d are before the calls", shown, answer[:n], leading+len(before))
				}
			}
		}
		for _, c := range calls {
			var object map[string]any
			if err := json.Unmarshal(c.Arguments, &object); err != nil || object == nil || c.Name != "king" && c.Name != "girl" {
				t.Errorf("%s %s, %v", c.Name, c.Arguments, err)
			}
		}
	})
}

// TestCallsFrom: an answer without calls is shown as it comes, and marks wait until they are complete.
func TestCallsFrom(t *testing.T) {
	for _, c := range []struct {
		answer string
		n      int
	}{
		{"", 0}, {"Hello", 5}, {"Hello ", 5}, {"a < b", 5}, {"a <b", 1}, {"a <b c", 6}, {"a <tool_call>", 1}, {"a <tool_call> x", 15}, {"a[1]", 4}, {"a[", 1}, {"a [TOOL_CALLS] [", 1},
		{"a [TOOL_CALLS] [{", 1}, {"a {", 1}, {"a {b} c", 1}, {"a <t>\n{", 1}, {"a <t> b {", 7},
	} {
		if n := CallsFrom(c.answer); n != c.n {
			t.Errorf("%q: %d, want %d", c.answer, n, c.n)
		}
	}
}
