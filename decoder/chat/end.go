package chat

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// What the probes of EndTokens say. No template looks for these words.
const (
	probeUser = "leanprobeuser"
	probeText = "leanprobetext"
	probeLast = "leanprobelast"
)

// EndTokens tells which special tokens end an assistant's message, of the special tokens of a tokenizer. Generation stops at
// the first of them.
//
// The templates tell: they write a conversation with a known answer, and with a known call of a tool. The special tokens behind
// the answer or the call end it, up to the beginning of another answer. No end are tokens that are also between two calls, between two
// arguments, or between the reasoning and the answer. If a call is followed by an end of answers, tokens before that are no
// ends. If a template writes no special token behind an answer, the first one of the next message ends it.
//
// The error is of a template that writes no conversation of a user and an assistant.
func (t *Templates) EndTokens(special []string) ([]string, error) {
	special = slices.DeleteFunc(slices.Clone(special), func(s string) bool { return s == "" })
	slices.SortStableFunc(special, func(a, b string) int { return len(b) - len(a) })
	var ends []string
	var failed error
	written := false
	for _, name := range t.Names() {
		p := prober{t: t, name: name, special: special}
		found, err := p.text()
		if err != nil {
			failed = fmt.Errorf("chat template %s writes no answer: %w", quote(name), err)
			continue
		}
		written = true
		for _, token := range append(found, p.call(found)...) {
			if !slices.Contains(ends, token) {
				ends = append(ends, token)
			}
		}
	}
	if !written {
		return nil, failed
	}
	return ends, nil
}

// prober writes conversations by one template.
type prober struct {
	t       *Templates
	name    string
	special []string
	prompt  []string // the special tokens that begin an answer
	always  []string // those behind a question, of a template that may write the prompt always
	begin   []string // and those before the question
}

// tokens lists the special tokens of a text, in their order.
func (p *prober) tokens(text string) []string {
	var list []string
next:
	for text != "" {
		for _, s := range p.special {
			if strings.HasPrefix(text, s) {
				if !slices.Contains(list, s) {
					list = append(list, s)
				}
				text = text[len(s):]
				continue next
			}
		}
		text = text[1:]
	}
	return list
}

// write writes a conversation in the first way that the template takes: with its contents as texts or as parts, without and
// with a message of the system, without and with tools. All words must be there.
func (p *prober) write(c Conversation, words ...string) (text string, err error) {
	c.Template = p.name
	for n := range 8 {
		try := c
		try.Messages = slices.Clone(c.Messages)
		if n&1 > 0 {
			try.Messages = slices.Insert(try.Messages, 0, Message{Role: "system", Content: "x"})
		}
		if n&2 > 0 {
			for i, m := range try.Messages {
				if m.Content != "" {
					try.Messages[i].Parts = []json.RawMessage{json.RawMessage(`{"type":"text","text":"` + m.Content + `"}`)}
				}
			}
		}
		if n&4 > 0 {
			if c.Tools != nil {
				break
			}
			try.Tools = probeTools
		}
		out, e := p.t.Render(try)
		for _, word := range words {
			if e == nil && !strings.Contains(out, word) {
				e = fmt.Errorf("%w: the template leaves a message out", ErrRender)
			}
		}
		if e == nil {
			return out, nil
		}
		if err == nil {
			err = e
		}
	}
	return "", err
}

// between lists the special tokens between two words of a conversation, none if the template does not write it.
func (p *prober) between(c Conversation, first, last string) []string {
	out, err := p.write(c, first, last)
	if err != nil {
		return nil
	}
	part, _, _ := strings.Cut(behind(out, first), last)
	return p.tokens(part)
}

// behind is the part of a text behind the last occurrence of a word.
func behind(text, word string) string {
	if i := strings.LastIndex(text, word); i >= 0 {
		return text[i+len(word):]
	}
	return ""
}

// ends cuts tokens before the beginning of another answer, and takes out those that are no end.
func (p *prober) ends(tokens []string, never ...[]string) []string {
	// A prompt that is always there is behind questions and answers alike.
	n := 0
	for n < min(len(tokens), len(p.always)) && tokens[len(tokens)-1-n] == p.always[len(p.always)-1-n] {
		n++
	}
	if n < len(tokens) {
		tokens = tokens[:len(tokens)-n]
	} else if ends := slices.DeleteFunc(slices.Clone(tokens), func(s string) bool { return slices.Contains(p.begin, s) }); len(ends) > 0 {
		tokens = ends
	}
	if len(p.prompt) > 0 {
		if i := slices.Index(tokens, p.prompt[0]); i >= 0 {
			tokens = tokens[:i]
		}
	}
	none := append(slices.Concat(never...), p.prompt...)
	return slices.DeleteFunc(slices.Clone(tokens), func(s string) bool { return slices.Contains(none, s) })
}

// text finds the tokens that end an answer.
func (p *prober) text() ([]string, error) {
	user, answer := Message{Role: "user", Content: probeUser}, Message{Role: "assistant", Content: probeText}
	c := Conversation{Messages: []Message{user, answer}}
	out, err := p.write(c, probeText)
	if err != nil {
		return nil, err
	}
	question := Conversation{Messages: []Message{user}}
	if before, err := p.write(question, probeUser); err == nil {
		question.AddGenerationPrompt = true
		after, err := p.write(question, probeUser)
		if prompt, ok := strings.CutPrefix(after, before); err == nil && ok && prompt != "" {
			p.prompt = p.tokens(prompt)
		} else if err == nil && ok {
			p.always = p.tokens(behind(before, probeUser))
			begin, _, _ := strings.Cut(before, probeUser)
			p.begin = p.tokens(begin)
		}
	}
	reasoned := Conversation{Messages: []Message{user, {Role: "assistant", Content: probeText, Reasoning: probeLast}}}
	inside := p.between(reasoned, probeLast, probeText)
	if list := p.ends(p.tokens(behind(out, probeText)), inside); len(list) > 0 {
		return list, nil
	}
	c.Messages = append(c.Messages, Message{Role: "user", Content: probeLast})
	return p.next(c, inside), nil
}

// next finds the tokens between an answer or a call and the message behind it. Tokens that begin messages are no end, unless there are
// no others: then it is the first.
func (p *prober) next(c Conversation, inside []string) []string {
	out, err := p.write(c, probeText, probeLast)
	if err != nil {
		return nil
	}
	begin, _, _ := strings.Cut(out, probeUser)
	between, _, _ := strings.Cut(behind(out, probeText), probeLast)
	all := p.tokens(between)
	if ends := p.ends(all, inside, p.tokens(begin)); len(ends) > 0 {
		return ends
	}
	all = p.ends(all, inside)
	return all[:min(1, len(all))]
}

var probeTools = []json.RawMessage{json.RawMessage(`{"type":"function","function":{"name":"probe","description":"x","parameters":{"type":"object","properties":{"x":{"type":"string","description":"x"},"y":{"type":"string","description":"x"}},"required":["x"]}}}`)}

// call finds the tokens that end a call of a tool, if the template writes calls. Answers end with the tokens of text.
func (p *prober) call(text []string) []string {
	calls := func(arguments ...string) Conversation {
		m := Message{Role: "assistant"}
		for i, a := range arguments {
			m.ToolCalls = append(m.ToolCalls, ToolCall{ID: fmt.Sprintf("callprob%d", i), Name: "probe", Arguments: json.RawMessage(a)})
		}
		return Conversation{Tools: probeTools, Messages: []Message{{Role: "user", Content: probeUser}, m}}
	}
	const first, last, both = `{"x":"` + probeText + `"}`, `{"x":"` + probeLast + `"}`, `{"x":"` + probeText + `","y":"` + probeLast + `"}`
	inside := append(p.between(calls(first, last), probeText, probeLast), p.between(calls(both), probeText, probeLast)...)
	one := calls(first)
	var list []string
	if out, err := p.write(one, probeText); err == nil {
		list = p.ends(p.tokens(behind(out, probeText)), inside)
	}
	if len(list) == 0 {
		one.Messages = append(one.Messages, Message{Role: "tool", Content: probeLast, ToolCallID: one.Messages[1].ToolCalls[0].ID, Name: "probe"})
		list = p.next(one, inside)
	}
	if slices.ContainsFunc(list, func(s string) bool { return slices.Contains(text, s) }) {
		return nil
	}
	return list
}
