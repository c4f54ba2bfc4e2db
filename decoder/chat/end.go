package chat

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// Contents of the probe messages of EndTokens. No template treats these words specially.
const (
	probeUser = "leanprobeuser"
	probeText = "leanprobetext"
	probeLast = "leanprobelast"
)

// EndTokens returns the special tokens that end an assistant's message. The argument lists the special tokens of the tokenizer.
// Generation stops at the first end token.
//
// EndTokens renders probe conversations with a known answer and with a known tool call. The end tokens are the special tokens
// after the answer or the call and before the beginning of another answer, by these rules:
//
//   - A token that is also between two calls, between two arguments, or between the reasoning and the answer is not an end token.
//   - If a token that ends answers follows a call, then calls add no end tokens.
//   - If a template writes no special token after an answer, the first special token of the next message is the end token.
//
// EndTokens returns an error if no template can render a conversation of a user and an assistant.
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

// prober renders probe conversations with one template.
type prober struct {
	t       *Templates
	name    string
	special []string
	prompt  []string // the special tokens that begin an answer
	always  []string // the special tokens after a question, if AddGenerationPrompt changes nothing
	begin   []string // the special tokens before the question, in the same case
}

// tokens returns the distinct special tokens of a text in order of first occurrence.
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

// write renders a conversation in the first form that the template accepts: with text or part contents, without or with a
// system message, and without or with tools. The output must contain all words.
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

// between returns the special tokens between two words of a rendered conversation. between returns nil if the template cannot
// render the conversation.
func (p *prober) between(c Conversation, first, last string) []string {
	out, err := p.write(c, first, last)
	if err != nil {
		return nil
	}
	part, _, _ := strings.Cut(behind(out, first), last)
	return p.tokens(part)
}

// behind returns the part of a text after the last occurrence of a word.
func behind(text, word string) string {
	if i := strings.LastIndex(text, word); i >= 0 {
		return text[i+len(word):]
	}
	return ""
}

// ends returns the tokens before the beginning of another answer, without the generation prompt and the tokens of never.
func (p *prober) ends(tokens []string, never ...[]string) []string {
	// A generation prompt that the template always writes follows both questions and answers.
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

// text returns the tokens that end an answer.
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

// next returns the end tokens between an answer or a call and the next message. Tokens that begin messages are excluded. If no
// other token remains, next returns the first token.
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

// call returns the tokens that end a tool call. The tokens of text end answers: call returns nil if one of these tokens also
// ends a call, or if the template writes no calls.
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
