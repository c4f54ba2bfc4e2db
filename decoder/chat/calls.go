package chat

import (
	"bytes"
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

// ToolNames returns the names of tools, which are JSON objects as in [Conversation].
func ToolNames(tools []json.RawMessage) (names []string) {
	for _, tool := range tools {
		var t struct {
			Name     string
			Function struct{ Name string }
		}
		if err := json.Unmarshal(tool, &t); err != nil {
			continue // a form that only the template knows
		}
		if t.Function.Name != "" {
			t.Name = t.Function.Name
		}
		if t.Name != "" {
			names = append(names, t.Name)
		}
	}
	return names
}

// mostCalls bounds the places of an answer at which a call may begin.
const mostCalls = 1000

// Marks around calls, such as <tool_call>, [TOOL_CALLS] and <|python_tag|>, and lists of calls.
var (
	markBefore = regexp.MustCompile(`((<[^<>\s]+>|\[[A-Z_]+\])\s*)*(\[\s*)?$`)
	markAfter  = regexp.MustCompile(`^[\s,;\]]*((</?[^<>\s]+>|\[/?[A-Z_]+\])[\s,;\[]*)*$`)
	markBegun  = regexp.MustCompile(`^((<[^<>\s]+>|\[[A-Z_]+\])\s*)*(<[^<>\s]*|\[[A-Z_]*|\[\s*)?$`)
)

// FindCalls finds calls of tools in an answer. A call is a JSON object with the name of a tool, and with an object "arguments" or
// "parameters". before is the answer before the calls. calls is nil if there are none, or if there is more than marks between and after
// them.
func FindCalls(answer string, tools []json.RawMessage) (before string, calls []ToolCall) {
	names := ToolNames(tools)
	done := 0
	for at, tries := 0, 0; tries < mostCalls; tries++ {
		i := strings.IndexByte(answer[at:], '{')
		if i < 0 {
			break
		}
		at += i
		d := json.NewDecoder(strings.NewReader(answer[at:]))
		var call struct {
			Name                  string
			Arguments, Parameters json.RawMessage
		}
		if err := d.Decode(&call); err != nil || !slices.Contains(names, call.Name) {
			at++
			continue
		}
		if call.Arguments == nil {
			call.Arguments = call.Parameters
		}
		var inner string
		if json.Unmarshal(call.Arguments, &inner) == nil { // an object in a string, as OpenAI's API has it
			call.Arguments = json.RawMessage(inner)
		}
		if !json.Valid(call.Arguments) || bytes.TrimSpace(call.Arguments)[0] != '{' {
			at++
			continue
		}
		if len(calls) == 0 {
			before = answer[:at]
			before = strings.TrimSpace(before[:markBefore.FindStringIndex(before)[0]])
		} else if !markAfter.MatchString(answer[done:at]) {
			return "", nil
		}
		calls = append(calls, ToolCall{Name: call.Name, Arguments: call.Arguments})
		at += int(d.InputOffset())
		done = at
	}
	if !markAfter.MatchString(answer[done:]) {
		return "", nil
	}
	return before, calls
}

// CallsFrom returns the number of bytes of the beginning of an answer that are before all calls, whatever follows. So a stream may show
// them before the answer has ended.
func CallsFrom(answer string) int {
	if i := strings.IndexByte(answer, '{'); i >= 0 {
		return len(strings.TrimRightFunc(answer[:markBefore.FindStringIndex(answer[:i])[0]], unicode.IsSpace))
	}
	for i := range len(answer) {
		if (answer[i] == '<' || answer[i] == '[') && markBegun.MatchString(answer[i:]) {
			return len(strings.TrimRightFunc(answer[:i], unicode.IsSpace))
		}
	}
	return len(strings.TrimRightFunc(answer, unicode.IsSpace))
}
