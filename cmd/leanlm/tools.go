package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
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
	names := chat.ToolNames(s.tools)
	if len(names) > 0 && !slices.Contains(names, name) {
		s.say("/tool: no tool %q; -tools has %s", short(name), strings.Join(names, ", "))
		return nil
	}
	last := len(s.turns) - 1
	before, calls := chat.FindCalls(s.turns[last].answer, s.tools)
	found := calls != nil
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
