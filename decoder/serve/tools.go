package serve

import (
	"encoding/json"
	"fmt"
	"slices"

	"gorgonia.org/leanattention/decoder/chat"
	"gorgonia.org/leanattention/decoder/jsonschema"
)

// toolCall is a call of a tool in an answer.
type toolCall struct {
	Index    *int         `json:"index,omitempty"` // in an event
	ID       string       `json:"id"`
	Type     string       `json:"type"`
	Function toolFunction `json:"function"`
}

type toolFunction struct {
	Name      string `json:"name"`
	Arguments string `json:"arguments"`
}

var finishCalls = "tool_calls"

// unsent is an answer that may have calls of tools. The text before the calls is sent at once, and the rest at the end.
type unsent struct {
	text string
	sent int // bytes
}

// add adds a piece, and returns the text that is to be sent. With the last piece, add returns the calls of the whole answer.
func (u *unsent) add(p *piece, tools []json.RawMessage) (text string, calls []chat.ToolCall) {
	u.text += p.text
	to := max(u.sent, chat.CallsFrom(u.text))
	if p.finish != nil {
		if _, calls = chat.FindCalls(u.text, tools); calls == nil {
			to = len(u.text)
		}
	}
	text = u.text[u.sent:to]
	u.sent = to
	return text, calls
}

// toolCalls returns calls as an answer or an event has them.
func toolCalls(calls []chat.ToolCall, event bool) (all []toolCall) {
	for i, c := range calls {
		t := toolCall{ID: newID("")[:9], Type: "function", Function: toolFunction{c.Name, string(c.Arguments)}} // Mistral's templates want nine letters and digits
		if event {
			t.Index = &i
		}
		all = append(all, t)
	}
	return all
}

// tools are the tools of a request.
type tools struct {
	list      []json.RawMessage // as the template has them; nil: none
	functions []tool
}

// tool is a function that a model may call.
type tool struct {
	name       string
	parameters json.RawMessage // nil: any object
	strict     bool
}

// readTools reads tools.
func (s *Server) readTools(raw json.RawMessage) (t tools, err error) {
	if err := json.Unmarshal(raw, &t.list); err != nil {
		return t, wrong("tools", "%s is no list", short(raw))
	}
	if len(t.list) == 0 {
		return t, wrong("tools", "the list is empty")
	}
	if !s.takesTools {
		return t, wrong("tools", "the model's chat template has no place for tools")
	}
	for i, raw := range t.list {
		at := fmt.Sprintf("tools[%d]", i)
		var f tool
		function := false
		err := members{
			"type": only(`"function"`),
			"function": func(raw json.RawMessage) error {
				function = true
				return members{
					"name": into(&f.name), "description": ignored[string](), "strict": into(&f.strict),
					"parameters": func(raw json.RawMessage) error {
						f.parameters = raw
						return ignored[map[string]json.RawMessage]()(raw)
					},
				}.read(raw, at+".function")
			},
		}.read(raw, at)
		if err == nil && (!function || f.name == "") {
			err = wrong(at, "function.name is missing")
		}
		if err != nil {
			return t, err
		}
		t.functions = append(t.functions, f)
	}
	return t, nil
}

// choose applies tool_choice; nil: auto. choose returns the schema of an answer that must be a call; nil: the answer may be a text.
func (s *Server) choose(t *tools, raw json.RawMessage) (*jsonschema.Schema, error) {
	const field = "tool_choice"
	if raw != nil && t.list == nil {
		return nil, wrong(field, "the request has no tools")
	}
	choice, name := "auto", ""
	if raw != nil && json.Unmarshal(raw, &choice) != nil {
		choice = ""
		err := members{
			"type":     only(`"function"`),
			"function": func(raw json.RawMessage) error { return members{"name": into(&name)}.read(raw, field+".function") },
		}.read(raw, field)
		if err != nil {
			return nil, err
		}
		if name == "" {
			return nil, wrong(field, "function.name is missing")
		}
	}
	switch choice {
	case "none":
		*t = tools{}
		return nil, nil
	case "auto":
		if i := slices.IndexFunc(t.functions, func(f tool) bool { return f.strict }); i >= 0 {
			return nil, wrong(fmt.Sprintf("tools[%d].function.strict", i), "true, and nothing keeps a call within a schema unless %s is \"required\" or names the function", field)
		}
		return nil, nil
	case "required", "":
	default:
		return nil, wrong(field, "%q is none of auto, none, required, and no object", short(choice))
	}
	var all []jsonschema.Function
	for i, f := range t.functions {
		if name != "" && f.name != name {
			continue
		}
		if slices.ContainsFunc(all, func(o jsonschema.Function) bool { return o.Name == f.name }) {
			return nil, wrong(fmt.Sprintf("tools[%d].function.name", i), "%q is given twice", short(f.name))
		}
		all = append(all, jsonschema.Function{Name: f.name, Parameters: f.parameters})
	}
	if all == nil {
		return nil, wrong(field, "there is no function %q among tools", short(name))
	}
	schema, err := s.formats.compileCall(all)
	if err != nil {
		return nil, wrong("tools", "%v", err)
	}
	return schema, nil
}
