package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	"gorgonia.org/leanattention/decoder/chat"
)

// readTools reads the file of -tools. The keys of each tool keep their order.
func readTools(name string, in io.Reader) (tools []json.RawMessage, err error) {
	if name == "" {
		return nil, nil
	}
	if name == "-" {
		return nil, usagef("-tools - is standard input, from which messages are read")
	}
	text, err := readText(name, in)
	if err != nil {
		return nil, fmt.Errorf("-tools: %w", err)
	}
	if err := json.Unmarshal([]byte(text), &tools); err != nil {
		return nil, fmt.Errorf("-tools %s: no JSON list of tools: %w", name, err)
	}
	if len(tools) == 0 {
		return nil, fmt.Errorf("-tools %s: the list is empty", name)
	}
	for i, tool := range tools {
		if tool = bytes.TrimSpace(tool); tool[0] != '{' {
			return nil, fmt.Errorf("-tools %s: tool %d is no JSON object", name, i+1)
		}
	}
	return tools, nil
}

// checkTools returns an error if the template has no place for tools.
func (s *session) checkTools() error {
	if s.tools == nil {
		return nil
	}
	messages := append(slices.Clone(s.messages), chat.Message{Role: "user", Content: "Hello"})
	with, err := s.templates.Render(chat.Conversation{Messages: messages, Tools: s.tools})
	if err != nil {
		return fmt.Errorf("-tools: %w", err)
	}
	without, err := s.templates.Render(chat.Conversation{Messages: messages})
	if err == nil && with == without {
		return fmt.Errorf("-tools: the model's chat template has no place for tools")
	}
	return nil
}

// toolNames returns the names of the tools.
func (s *session) toolNames() (names []string) {
	for _, tool := range s.tools {
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
)

// findCalls finds calls of tools in an answer: JSON objects with the name of a tool, and an object "arguments" or "parameters". before
// is the answer before the calls. ok reports whether there are calls, and nothing but marks between and after them.
func findCalls(answer string, tools []string) (before string, calls []chat.ToolCall, ok bool) {
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
		if err := d.Decode(&call); err != nil || !slices.Contains(tools, call.Name) {
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
			return "", nil, false
		}
		calls = append(calls, chat.ToolCall{Name: call.Name, Arguments: call.Arguments})
		at += int(d.InputOffset())
		done = at
	}
	return before, calls, len(calls) > 0 && markAfter.MatchString(answer[done:])
}

// result takes the result of a tool that the last answer calls. After a result for each call, or after one if the answer has no call
// that is understood, the model goes on.
func (s *session) result(ctx context.Context, text string) error {
	name, content, _ := strings.Cut(text, " ")
	content = strings.TrimSpace(content)
	if len(s.turns) == 0 {
		s.say("/tool: there is no answer that calls a tool")
		return nil
	}
	if content == "" {
		s.say("/tool needs the tool's name and its result: /tool NAME RESULT")
		return nil
	}
	names := s.toolNames()
	if len(names) > 0 && !slices.Contains(names, name) {
		s.say("/tool: no tool %q; -tools has %s", short(name), strings.Join(names, ", "))
		return nil
	}
	last := len(s.turns) - 1
	before, calls, found := findCalls(s.turns[last].answer, names)
	if !found {
		calls = []chat.ToolCall{{Name: name}}
	}
	for i := range calls {
		calls[i].ID = fmt.Sprintf("c%04d%04d", last%10000, i%10000) // Mistral's templates want nine letters and digits
	}
	var missing []string
	id := ""
	for _, c := range calls {
		switch {
		case slices.ContainsFunc(s.results, func(r chat.Message) bool { return r.ToolCallID == c.ID }):
		case c.Name == name && id == "":
			id = c.ID
		default:
			missing = append(missing, c.Name)
		}
	}
	if id == "" {
		s.say("/tool: the answer has no call of %s without a result; results are missing for %s", name, strings.Join(missing, ", "))
		return nil
	}
	if len(s.results) == 0 {
		s.asked++
	}
	s.results = append(s.results, chat.Message{Role: "tool", Name: name, ToolCallID: id, Content: content})
	if len(missing) > 0 {
		s.say("%d of %d results; /tool gives the next: %s", len(s.results), len(calls), strings.Join(missing, ", "))
		return nil
	}
	results := s.results
	s.results = nil
	if !found {
		calls = nil
	}
	ids, err := s.addResults(before, calls, results)
	if err != nil {
		s.drop(err)
		return nil
	}
	return s.answer(ctx, ids)
}

// addResults adds the results of calls to the conversation, and returns its tokens. The answer with the calls gets a form that the
// template takes: calls whose arguments are objects, calls whose arguments are texts, or the text that the model wrote.
func (s *session) addResults(before string, calls []chat.ToolCall, results []chat.Message) (ids []int, err error) {
	n := len(s.messages)
	written := s.messages[n-1]
	s.turns = append(slices.Clip(s.turns), turn{begin: n, called: &written})
	var forms []chat.Message
	if calls != nil {
		texts := slices.Clone(calls)
		for i, c := range calls {
			if texts[i].Arguments, err = json.Marshal(string(c.Arguments)); err != nil {
				return nil, err
			}
		}
		forms = []chat.Message{{Role: "assistant", Content: before, ToolCalls: calls}, {Role: "assistant", Content: before, ToolCalls: texts}}
	}
	forms = append(forms, written)
	old := s.messages
	for _, form := range forms {
		s.messages = slices.Concat(old[:n-1], []chat.Message{form}, results)
		if form.ToolCalls != nil && !s.renders(n-1, func(m *chat.Message) {
			m.ToolCalls = slices.Clone(m.ToolCalls)
			m.ToolCalls[0].Name += "x"
		}) {
			continue
		}
		if ids, err = s.prompt(); err == nil {
			break
		}
	}
	if err == nil && !s.renders(n, func(m *chat.Message) { m.Content += "x" }) {
		err = fmt.Errorf("the model's chat template has no place for results of tools")
	}
	return ids, err
}

// renders reports whether a change of a message changes the text of the conversation.
func (s *session) renders(i int, change func(*chat.Message)) bool {
	conversation := chat.Conversation{Messages: s.messages, Tools: s.tools, AddGenerationPrompt: true}
	text, err := s.templates.Render(conversation)
	if err != nil {
		return false
	}
	conversation.Messages = slices.Clone(s.messages)
	change(&conversation.Messages[i])
	other, err := s.templates.Render(conversation)
	return err != nil || other != text
}
