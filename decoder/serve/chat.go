package serve

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"gorgonia.org/leanattention/decoder/chat"
	"gorgonia.org/leanattention/decoder/tokenizer"
)

// chatCompletion is the answer of /v1/chat/completions.
type chatCompletion struct {
	ID      string       `json:"id"`
	Object  string       `json:"object"`
	Created int64        `json:"created"`
	Model   string       `json:"model"`
	Choices []chatChoice `json:"choices"`
	Usage   *usage       `json:"usage,omitempty"`
}

type chatChoice struct {
	Index        int           `json:"index"`
	Message      *answered     `json:"message,omitempty"` // of an answer
	Delta        *delta        `json:"delta,omitempty"`   // of an event
	LogProbs     *chatLogProbs `json:"logprobs"`
	FinishReason *string       `json:"finish_reason"`
}

type answered struct {
	Role    string     `json:"role"`
	Content *string    `json:"content"` // nil: calls alone
	Refusal *string    `json:"refusal"`
	Calls   []toolCall `json:"tool_calls,omitempty"`
}

type delta struct {
	Role    string     `json:"role,omitempty"`
	Content *string    `json:"content,omitempty"`
	Calls   []toolCall `json:"tool_calls,omitempty"`
}

type chatLogProbs struct {
	Content []tokenLogProb `json:"content"`
	Refusal *string        `json:"refusal"`
}

type tokenLogProb struct {
	likely
	Top []likely `json:"top_logprobs"`
}

type likely struct {
	Token   string  `json:"token"`
	LogProb float64 `json:"logprob"`
	Bytes   []int   `json:"bytes"`
}

func (s *Server) chat(w http.ResponseWriter, r *http.Request, body []byte) error {
	if s.templates == nil {
		return &apiError{status: http.StatusNotFound, message: fmt.Sprintf("the model %q has no chat template: /v1/completions continues texts", s.options.Model)}
	}
	c := s.newCommon()
	c.request.Ends = s.ends
	var messages []chat.Message
	var tools tools
	var choice json.RawMessage
	probabilities, top, most := false, 0, 0
	fields := c.fields(s)
	fields["messages"] = func(raw json.RawMessage) (err error) {
		messages, err = readMessages(raw)
		return err
	}
	fields["max_completion_tokens"] = within(&most, 1, 1<<31-1)
	fields["logprobs"] = into(&probabilities)
	fields["top_logprobs"] = within(&top, 0, mostLogProbs)
	fields["response_format"] = func(raw json.RawMessage) (err error) {
		c.schema, err = s.readFormat(raw)
		return err
	}
	fields["tools"] = func(raw json.RawMessage) (err error) {
		tools, err = s.readTools(raw)
		return err
	}
	fields["tool_choice"] = func(raw json.RawMessage) error { choice = raw; return nil }
	fields["metadata"] = ignored[map[string]string]()
	fields["store"] = only("false")
	fields["service_tier"] = only(`"auto"`)
	fields["parallel_tool_calls"] = ignored[bool]()
	if err := fields.read(body, ""); err != nil {
		return err
	}
	call, err := s.choose(&tools, choice)
	switch {
	case err != nil:
		return err
	case messages == nil:
		return wrong("messages", "the field is missing")
	case most > 0 && c.request.Tokens > 0:
		return wrong("max_completion_tokens", "max_tokens is given, too")
	case top > 0 && !probabilities:
		return wrong("top_logprobs", "logprobs is not true")
	case c.schema != nil && tools.list != nil:
		return wrong("response_format", "tools are given, too, and a call of a tool is no JSON of the format")
	case call != nil && c.request.Stop != nil:
		return wrong("stop", "tool_choice asks for a call, which a text of stop would cut")
	case c.schema != nil && c.request.Stop != nil:
		return wrong("stop", "response_format asks for JSON, which a text of stop would cut")
	}
	if call != nil {
		c.schema = call
	}
	c.request.Tokens = max(c.request.Tokens, most)
	if probabilities {
		c.logprobs = top
	}
	prompt, err := s.conversation(messages, tools.list)
	if err != nil {
		return err
	}
	run, err := s.start(r, c, [][]int{prompt})
	if err != nil {
		return err
	}
	defer run.end()
	answer := chatCompletion{ID: newID("chatcmpl-"), Object: "chat.completion", Created: time.Now().Unix(), Model: s.options.Model, Choices: []chatChoice{}}
	if c.stream {
		answer.Object = "chat.completion.chunk"
		first := answer
		for i := range run.texts {
			first.Choices = append(first.Choices, chatChoice{Index: i, Delta: &delta{Role: "assistant", Content: new(string)}})
		}
		answers := make([]unsent, len(run.texts))
		return run.stream(w, first, func(index int, p *piece) any {
			e := answer
			choice := chatChoice{Index: index, Delta: &delta{}, FinishReason: p.finish}
			text := p.text
			if tools.list != nil {
				var calls []chat.ToolCall
				if text, calls = answers[index].add(p, tools.list); calls != nil {
					choice.Delta.Calls, choice.FinishReason = toolCalls(calls, true), &finishCalls
				}
			}
			if p.finish == nil || text != "" {
				choice.Delta.Content = &text
			}
			if text == "" && p.finish == nil && !probabilities {
				return nil
			}
			if probabilities && p.token != nil {
				choice.LogProbs = s.chatLogProbs([]piece{*p}, top)
			}
			e.Choices = []chatChoice{choice}
			return e
		}, func(u *usage) any {
			e := answer
			e.Usage = u
			return e
		})
	}
	all, err := run.collect()
	if err != nil {
		return err
	}
	u := run.usage()
	answer.Usage = &u
	for _, x := range all {
		text := x.text.String()
		choice := chatChoice{Index: x.index, Message: &answered{Role: "assistant", Content: &text}, FinishReason: &x.finish}
		if before, calls := chat.FindCalls(text, tools.list); calls != nil {
			choice.Message.Calls, choice.FinishReason = toolCalls(calls, false), &finishCalls
			if choice.Message.Content = nil; before != "" {
				choice.Message.Content = &before
			}
		}
		if probabilities {
			choice.LogProbs = s.chatLogProbs(x.pieces, top)
		}
		answer.Choices = append(answer.Choices, choice)
	}
	return writeJSON(w, answer)
}

func (s *Server) chatLogProbs(pieces []piece, top int) *chatLogProbs {
	l := &chatLogProbs{Content: []tokenLogProb{}}
	for _, p := range pieces {
		if p.token == nil {
			continue
		}
		t := tokenLogProb{likely: s.likely(p.token.ID, p.token.LogProb), Top: []likely{}}
		for _, x := range p.token.Likely[:min(top, len(p.token.Likely))] {
			t.Top = append(t.Top, s.likely(x.ID, x.LogProb))
		}
		l.Content = append(l.Content, t)
	}
	return l
}

func (s *Server) likely(id int, p float64) likely {
	l := likely{Token: s.tokenText(id), LogProb: finite(p), Bytes: []int{}}
	for _, b := range []byte(l.Token) {
		l.Bytes = append(l.Bytes, int(b))
	}
	return l
}

// tokenText returns the text of a token; of a special token, the name.
func (s *Server) tokenText(id int) string {
	t := s.model.Tokenizer()
	if name, ok := t.Special(id); ok {
		return name
	}
	return t.Decode([]int{id})
}

// readMessages reads the messages of a conversation.
func readMessages(raw json.RawMessage) (all []chat.Message, err error) {
	var list []json.RawMessage
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, wrong("messages", "%s is no list", short(raw))
	}
	if len(list) == 0 {
		return nil, wrong("messages", "the list is empty")
	}
	for i, raw := range list {
		at := fmt.Sprintf("messages[%d]", i)
		var m chat.Message
		content := false
		err := members{
			"role": func(raw json.RawMessage) error {
				if err := into(&m.Role)(raw); err != nil {
					return err
				}
				switch m.Role {
				case "developer":
					m.Role = "system"
				case "system", "user", "assistant", "tool":
				default:
					return fmt.Errorf("%q is none of system, developer, user, assistant, tool", short(m.Role))
				}
				return nil
			},
			"content": func(raw json.RawMessage) (err error) {
				content = true
				m.Content, err = readContent(raw)
				return err
			},
			"name":         into(&m.Name),
			"tool_call_id": into(&m.ToolCallID),
			"tool_calls":   into(&m.ToolCalls),
			"refusal":      ignored[string](),
		}.read(raw, at)
		switch {
		case err != nil:
			return nil, err
		case m.Role == "":
			return nil, wrong(at, "role is missing")
		case !content && (m.Role != "assistant" || m.ToolCalls == nil):
			return nil, wrong(at, "content is missing")
		case m.ToolCalls != nil && m.Role != "assistant":
			return nil, wrong(at, "role %s has no tool_calls", m.Role)
		}
		all = append(all, m)
	}
	return all, nil
}

// readContent reads a text, or parts that are texts.
func readContent(raw json.RawMessage) (string, error) {
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return text, nil
	}
	var parts []json.RawMessage
	if err := json.Unmarshal(raw, &parts); err != nil {
		return "", fmt.Errorf("%s is no text and no list of parts", short(raw))
	}
	var b strings.Builder
	for i, part := range parts {
		var kind struct{ Type string }
		if json.Unmarshal(part, &kind) == nil && kind.Type != "text" {
			return "", fmt.Errorf("part %d is of type %q, want text", i, short(kind.Type))
		}
		var text string
		if err := (members{"type": ignored[string](), "text": into(&text)}).read(part, fmt.Sprintf("content[%d]", i)); err != nil {
			return "", err
		}
		b.WriteString(text)
	}
	return b.String(), nil
}

// conversation returns the tokens of messages and of the beginning of an answer.
func (s *Server) conversation(messages []chat.Message, tools []json.RawMessage) ([]int, error) {
	tools = slices.Clone(tools) // newGuard changes texts
	guard := newGuard(s.special, messages, tools)
	text, err := s.templates.Render(chat.Conversation{Messages: messages, Tools: tools, AddGenerationPrompt: true})
	if err != nil && argumentsAsObjects(messages) {
		text, err = s.templates.Render(chat.Conversation{Messages: messages, Tools: tools, AddGenerationPrompt: true})
	}
	var said *chat.Exception
	switch {
	case errors.As(err, &said), errors.Is(err, chat.ErrLimit), errors.Is(err, chat.ErrRender), errors.Is(err, chat.ErrFormat):
		return nil, wrong("messages", "the chat template refuses them: %v", err)
	case err != nil:
		return nil, err
	}
	var ids []int
	for _, part := range guard.split(text) {
		more, err := s.encode("messages", part, tokenizer.Options{Special: true, Bare: true})
		if err != nil {
			return nil, err
		}
		ids = append(ids, more...)
	}
	return ids, s.checkLengths("messages", [][]int{ids})
}

// argumentsAsObjects replaces arguments of tool calls that are JSON strings by the objects in the strings: some templates take
// objects, others strings. ok reports whether an argument was replaced.
func argumentsAsObjects(messages []chat.Message) (ok bool) {
	for i := range messages {
		for j := range messages[i].ToolCalls {
			c := &messages[i].ToolCalls[j]
			var inner string
			if json.Unmarshal(c.Arguments, &inner) == nil && json.Valid([]byte(inner)) {
				c.Arguments, ok = json.RawMessage(inner), true
			}
		}
	}
	return ok
}

// A guard keeps names of special tokens in messages from becoming these tokens when the text of a template is encoded. newGuard puts a
// mark into each name, and split cuts the text of the template at the marks.
type guard struct{ mark string } // "": no message has a name

// newGuard changes the messages.
func newGuard(special []string, messages []chat.Message, tools []json.RawMessage) guard {
	has := func(text string) bool {
		for _, name := range special {
			if strings.Contains(text, name) {
				return true
			}
		}
		return false
	}
	// texts calls f with each text of the messages and tools.
	texts := func(f func(string) string) {
		for i := range tools {
			tools[i] = json.RawMessage(f(string(tools[i])))
		}
		for i := range messages {
			m := &messages[i]
			m.Content, m.Name, m.ToolCallID = f(m.Content), f(m.Name), f(m.ToolCallID)
			for j := range m.ToolCalls {
				c := &m.ToolCalls[j]
				c.ID, c.Name, c.Arguments = f(c.ID), f(c.Name), json.RawMessage(f(string(c.Arguments)))
			}
		}
	}
	found, all := false, ""
	texts(func(s string) string {
		found = found || has(s)
		all += s
		return s
	})
	if !found {
		return guard{}
	}
	mark := "\uE000" // of a private area
	for strings.Contains(all, mark) || strings.Contains(strings.Join(special, ""), mark) {
		mark += "\uE000"
	}
	texts(func(s string) string {
		for has(s) {
			for _, name := range special {
				_, first := utf8.DecodeRuneInString(name)
				s = strings.ReplaceAll(s, name, name[:first]+mark+name[first:])
			}
		}
		return s
	})
	return guard{mark}
}

func (g guard) split(text string) []string {
	if g.mark == "" {
		return []string{text}
	}
	return strings.Split(text, g.mark)
}
