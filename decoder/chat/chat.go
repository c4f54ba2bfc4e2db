package chat

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"gorgonia.org/leanattention/decoder/chat/internal/template"
)

// Errors of this package.
var (
	// ErrSyntax is returned for a template that is not valid Jinja, or that uses an unsupported feature.
	ErrSyntax = template.ErrSyntax
	// ErrRender is returned when a template fails for a conversation.
	ErrRender = template.ErrRender
	// ErrLimit is returned when a rendering exceeds a limit of [Options].
	ErrLimit = template.ErrLimit
	// ErrNoTemplate is returned if there is no template, or no template of the requested name.
	ErrNoTemplate = errors.New("no chat template")
	// ErrFormat is returned for a malformed template file, message, tool or variable.
	ErrFormat = errors.New("bad chat data")
)

// Exception is the error of a template that rejects a conversation by calling raise_exception.
type Exception = template.Exception

// Options holds the special tokens and the clock of templates, and the limits of a rendering.
type Options struct {
	// Tokens maps a name in templates, such as "bos_token" or "eos_token", to the text of the special token. An entry of
	// Tokens overrides the text that [Open] finds.
	Tokens map[string]string
	// Now is the clock of templates that write the date. Nil means time.Now.
	Now func() time.Time
	// MaxDepth limits the depth of nested macro calls. 0 means 100. The largest depth is 10000.
	MaxDepth int
	// MaxTime limits the time of a rendering. 0 means 5 seconds.
	MaxTime time.Duration
	// MaxOutput limits the output of a rendering and each intermediate text, in bytes. All texts and lists of a rendering
	// have at most 32 times MaxOutput bytes in total. 0 means 16 MiB. The largest limit is 32 MiB.
	MaxOutput int
}

// Conversation is the input of a template.
type Conversation struct {
	Messages []Message
	// Tools are JSON objects. Each object is the schema of a function in the format of OpenAI's API. Templates write the keys
	// of an object in the order of the JSON.
	Tools []json.RawMessage
	// Documents are JSON objects for templates that support documents.
	Documents []json.RawMessage
	// AddGenerationPrompt appends the beginning of an assistant's message.
	AddGenerationPrompt bool
	// Variables are further variables of the template, such as enable_thinking. The keys of a json.RawMessage keep their
	// order. All other values are encoded to JSON first.
	Variables map[string]any
	// Template is the name of a template. "" selects the template "tool_use" if the model has one and Tools is not empty, and
	// the template "default" otherwise.
	Template string
}

// Templates are the chat templates of a model. Templates are safe for concurrent use.
type Templates struct {
	byName map[string]*template.Template
	opts   Options
}

// New compiles templates. The map's key is the name of a template. The only template of a model has the name "default".
func New(templates map[string]string, opts Options) (*Templates, error) {
	if len(templates) == 0 {
		return nil, ErrNoTemplate
	}
	if opts.MaxDepth < 0 || opts.MaxTime < 0 || opts.MaxOutput < 0 {
		return nil, fmt.Errorf("chat: limits (depth %d, time %v, output %d) may not be negative: 0 is the default", opts.MaxDepth, opts.MaxTime, opts.MaxOutput)
	}
	if opts.MaxDepth == 0 {
		opts.MaxDepth = 100
	}
	if opts.MaxTime == 0 {
		opts.MaxTime = 5 * time.Second
	}
	if opts.MaxOutput == 0 {
		opts.MaxOutput = 16 << 20
	}
	// A call takes some kilobytes of stack. A stack of more than a gigabyte ends the program.
	opts.MaxDepth = min(opts.MaxDepth, 10000)
	opts.MaxOutput = min(opts.MaxOutput, 1<<25)
	if opts.Now == nil {
		opts.Now = time.Now
	}
	opts.Tokens = maps.Clone(opts.Tokens)
	t := &Templates{map[string]*template.Template{}, opts}
	for _, name := range slices.Sorted(maps.Keys(templates)) {
		compiled, err := template.Compile(templates[name])
		if err != nil {
			return nil, fmt.Errorf("chat template %s: %w", quote(name), err)
		}
		t.byName[name] = compiled
	}
	return t, nil
}

// Names returns the sorted names of the templates.
func (t *Templates) Names() []string { return slices.Sorted(maps.Keys(t.byName)) }

// Render returns the text of a conversation.
func (t *Templates) Render(c Conversation) (string, error) {
	name := c.Template
	if name == "" {
		name = "default"
		if _, ok := t.byName["tool_use"]; ok && len(c.Tools) > 0 {
			name = "tool_use"
		}
	}
	compiled, ok := t.byName[name]
	if !ok {
		return "", fmt.Errorf("%w %s: there are %q", ErrNoTemplate, quote(name), t.Names())
	}
	variables, err := t.variables(c)
	if err != nil {
		return "", err
	}
	text, err := compiled.Render(variables, template.Limits{Depth: t.opts.MaxDepth, Time: t.opts.MaxTime, Output: t.opts.MaxOutput}, t.opts.Now)
	if err != nil {
		return "", fmt.Errorf("chat template %s: %w", quote(name), err)
	}
	return text, nil
}

// variables returns the variables of a template for a conversation.
func (t *Templates) variables(c Conversation) (map[string]template.Value, error) {
	variables := map[string]template.Value{}
	set := func(name string, value any) error {
		data, ok := value.(json.RawMessage)
		var err error
		if !ok {
			data, err = encode(value)
		}
		if err == nil {
			variables[name], err = template.FromJSON(data)
		}
		if err != nil {
			return fmt.Errorf("%w: %s: %w", ErrFormat, quote(name), err)
		}
		return nil
	}
	for name, value := range c.Variables {
		if err := set(name, value); err != nil {
			return nil, err
		}
	}
	for name, text := range t.opts.Tokens {
		if _, ok := variables[name]; !ok {
			if err := set(name, text); err != nil {
				return nil, err
			}
		}
	}
	messages := c.Messages
	if messages == nil {
		messages = []Message{}
	}
	fixed := map[string]any{"messages": messages, "tools": nil, "documents": nil, "add_generation_prompt": c.AddGenerationPrompt}
	if c.Tools != nil {
		fixed["tools"] = c.Tools
	}
	if c.Documents != nil {
		fixed["documents"] = c.Documents
	}
	for name, value := range fixed {
		if _, ok := c.Variables[name]; ok {
			return nil, fmt.Errorf("%w: variable %s is a field of Conversation", ErrFormat, quote(name))
		}
		if err := set(name, value); err != nil {
			return nil, err
		}
	}
	return variables, nil
}

// quote returns s as a quoted string for an error, cut to 60 bytes.
func quote(s string) string {
	if len(s) > 60 {
		s = s[:60] + "..."
	}
	return strconv.Quote(s)
}

// encode returns the JSON encoding of v without HTML escapes.
func encode(v any) ([]byte, error) {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return []byte(b.String()), err
}
