package chat

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
)

// Message is a message of a conversation. A message decoded from JSON keeps all keys in their order, including keys without a
// field in Message.
type Message struct {
	Role string // "system", "user", "assistant" or "tool"
	// Content is the text. A non-nil Parts replaces Content.
	Content string
	// Parts are JSON objects such as {"type": "text", "text": "Hello"}.
	Parts []json.RawMessage
	// Reasoning is the reasoning of an assistant before the text. The JSON key is reasoning_content.
	Reasoning string
	// ToolCalls are the tool calls of an assistant.
	ToolCalls []ToolCall
	// ToolCallID is the ID of the call that a tool's message answers.
	ToolCallID string
	// Name is the name of the tool or of the speaker.
	Name string

	given []given // the keys of the JSON
}

// given is a key of a decoded message or call. value is set only if the key has no field or the JSON value is null.
type given struct {
	key   string
	value json.RawMessage
}

// ToolCall is a tool call. A call decoded from JSON keeps all keys in their order.
type ToolCall struct {
	ID   string
	Name string
	// Arguments are the function's arguments: a JSON object, or a JSON string that contains an object, as in OpenAI's API. Some
	// templates expect an object, and some templates expect a string.
	Arguments json.RawMessage

	given    []given
	function []given
}

// field is a key and a value of an object. set reports whether the value is not the zero value.
type field struct {
	key   string
	value any
	set   bool
}

var null = json.RawMessage("null")

// write returns the JSON encoding of an object: the given keys, then the other fields that are set.
func write(keys []given, fields []field) ([]byte, error) {
	var b bytes.Buffer
	add := func(key string, value any) error {
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		k, err := encode(key)
		if err != nil {
			return err
		}
		v, ok := value.(json.RawMessage)
		if !ok {
			if v, err = encode(value); err != nil {
				return err
			}
		}
		b.Write(k)
		b.WriteByte(':')
		b.Write(v)
		return nil
	}
	for _, g := range keys {
		value := any(g.value)
		if i := slices.IndexFunc(fields, func(f field) bool { return f.key == g.key }); i >= 0 && (fields[i].set || g.value == nil) {
			value = fields[i].value
		}
		if err := add(g.key, value); err != nil {
			return nil, err
		}
	}
	for _, f := range fields {
		if f.set && !slices.ContainsFunc(keys, func(g given) bool { return g.key == f.key }) {
			if err := add(f.key, f.value); err != nil {
				return nil, err
			}
		}
	}
	return slices.Concat([]byte("{"), b.Bytes(), []byte("}")), nil
}

// read decodes an object and returns its keys. read calls take for each key with a value other than null. take stores the value
// and reports whether the key has a field.
func read(data []byte, take func(key string, value json.RawMessage) (bool, error)) ([]given, error) {
	d := json.NewDecoder(bytes.NewReader(data))
	t, err := d.Token()
	if err != nil {
		return nil, err
	}
	if t != json.Delim('{') {
		return nil, fmt.Errorf("%s is no object", quote(string(data)))
	}
	keys := []given{}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return nil, err
		}
		g := given{key: key.(string)}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return nil, err
		}
		if slices.ContainsFunc(keys, func(k given) bool { return k.key == g.key }) {
			return nil, fmt.Errorf("key %s is there twice", quote(g.key))
		}
		if bytes.Equal(value, null) {
			g.value = null
		} else {
			known, err := take(g.key, value)
			if err != nil {
				return nil, fmt.Errorf("key %s: %w", quote(g.key), err)
			}
			if !known {
				g.value = value
			}
		}
		keys = append(keys, g)
	}
	_, err = d.Token()
	return keys, err
}

// MarshalJSON encodes the message in the form that templates read. A message that was not decoded from JSON always has a role
// and a content.
func (m Message) MarshalJSON() ([]byte, error) {
	fields := []field{
		{"role", m.Role, m.Role != "" || m.given == nil},
		{"content", m.Content, m.Content != "" || m.given == nil},
		{"reasoning_content", m.Reasoning, m.Reasoning != ""},
		{"tool_calls", m.ToolCalls, len(m.ToolCalls) > 0},
		{"tool_call_id", m.ToolCallID, m.ToolCallID != ""},
		{"name", m.Name, m.Name != ""},
	}
	if m.Parts != nil {
		fields[1] = field{"content", m.Parts, true}
	}
	return write(m.given, fields)
}

// UnmarshalJSON decodes a message in the format of OpenAI's API.
func (m *Message) UnmarshalJSON(data []byte) error {
	*m = Message{}
	keys, err := read(data, func(key string, value json.RawMessage) (bool, error) {
		var to any
		switch key {
		case "role":
			to = &m.Role
		case "content":
			to = &m.Content
			if value[0] == '[' {
				to = &m.Parts
			}
		case "reasoning_content":
			to = &m.Reasoning
		case "tool_calls":
			to = &m.ToolCalls
		case "tool_call_id":
			to = &m.ToolCallID
		case "name":
			to = &m.Name
		default:
			return false, nil
		}
		return true, json.Unmarshal(value, to)
	})
	if err != nil {
		return fmt.Errorf("%w: message: %w", ErrFormat, err)
	}
	m.given = keys
	return nil
}

// MarshalJSON encodes the call in the form that templates read.
func (c ToolCall) MarshalJSON() ([]byte, error) {
	if c.Arguments == nil && c.given == nil {
		return nil, errors.New("a tool call has no arguments: without any they are {}")
	}
	function, err := write(c.function, []field{{"name", c.Name, c.Name != "" || c.given == nil}, {"arguments", c.Arguments, c.Arguments != nil}})
	if err != nil {
		return nil, err
	}
	return write(c.given, []field{
		{"id", c.ID, c.ID != ""},
		{"type", "function", c.given == nil},
		{"function", json.RawMessage(function), c.given == nil},
	})
}

// UnmarshalJSON decodes a call in the format of OpenAI's API.
func (c *ToolCall) UnmarshalJSON(data []byte) error {
	*c = ToolCall{}
	var err error
	c.given, err = read(data, func(key string, value json.RawMessage) (bool, error) {
		switch key {
		case "id":
			return true, json.Unmarshal(value, &c.ID)
		case "function":
			c.function, err = read(value, func(key string, value json.RawMessage) (bool, error) {
				switch key {
				case "name":
					return true, json.Unmarshal(value, &c.Name)
				case "arguments":
					c.Arguments = value
					return true, nil
				}
				return false, nil
			})
			return true, err
		}
		return false, nil
	})
	if err != nil {
		return fmt.Errorf("tool call: %w", err)
	}
	return nil
}
