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
	// ErrSyntax: a template is not in Jinja's language, or uses what this package does not know.
	ErrSyntax = template.ErrSyntax
	// ErrRender: a template failed for a conversation.
	ErrRender = template.ErrRender
	// ErrLimit: a template went over a limit of [Options].
	ErrLimit = template.ErrLimit
	// ErrNoTemplate: there is no template, or none of the name.
	ErrNoTemplate = errors.New("no chat template")
	// ErrFormat: a file with templates, a message, a tool or a variable is malformed.
	ErrFormat = errors.New("bad chat data")
)

// Exception is the error of a template that refuses a conversation, by raise_exception.
type Exception = template.Exception

// Options are what templates find beside a conversation, and the limits of a rendering.
type Options struct {
	// Tokens has the texts of special tokens by their names in templates, such as "bos_token" and "eos_token". These texts
	// take precedence over the texts that [Open] finds.
	Tokens map[string]string
	// Now is the clock of templates that write the date. Nil: time.Now.
	Now func() time.Time
	// MaxDepth limits macros that call macros. 0: 100.
	MaxDepth int
	// MaxTime limits a rendering. 0: 5 seconds.
	MaxTime time.Duration
	// MaxOutput limits a rendering and each text on its way, in bytes. All texts on the way have at most 32 times as many.
	// 0: 16 MiB.
	MaxOutput int
}

// Conversation is what a template writes.
type Conversation struct {
	Messages []Message
	// Tools are JSON objects, each the schema of a function as in OpenAI's interface. Keys are written in their order.
	Tools []json.RawMessage
	// Documents are JSON objects, for templates that write them.
	Documents []json.RawMessage
	// AddGenerationPrompt adds the beginning of an assistant's message.
	AddGenerationPrompt bool
	// Variables are further variables of the template, such as enable_thinking. A json.RawMessage is written in its order. All
	// other values are encoded to JSON first.
	Variables map[string]any
	// Template is the name of a template. "": "tool_use" for a conversation with tools, if there is one, and else "default".
	Template string
}

// Templates are the chat templates of a model. They may be used by several goroutines at a time.
type Templates struct {
	byName map[string]*template.Template
	opts   Options
}

// New compiles templates by their names. A model with one template has it under "default".
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
	// A call takes some kilobytes of stack, and more than a gigabyte would end the program.
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

// Names lists the names of the templates, sorted.
func (t *Templates) Names() []string { return slices.Sorted(maps.Keys(t.byName)) }

// Render writes a conversation.
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

// variables are what the template finds.
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

// quote quotes what came from a file or a caller, cut to 60 bytes.
func quote(s string) string {
	if len(s) > 60 {
		s = s[:60] + "..."
	}
	return strconv.Quote(s)
}

// encode is json.Marshal without escapes for HTML.
func encode(v any) ([]byte, error) {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return []byte(b.String()), err
}
