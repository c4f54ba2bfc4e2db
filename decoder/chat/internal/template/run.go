package template

import (
	"errors"
	"fmt"
	"time"

	"github.com/ardanlabs/jinja"
)

// Errors of this package.
var (
	ErrSyntax = errors.New("template not understood")
	ErrRender = errors.New("template failed")
	ErrLimit  = errors.New("template over its limit")
)

// Exception is the error of a template that calls raise_exception.
type Exception struct{ Message string }

func (e *Exception) Error() string {
	return "the template refuses the conversation: " + quoteLong(e.Message, 500)
}

// Limits bound a rendering.
type Limits struct {
	Depth  int           // depth of nested macro calls
	Time   time.Duration // time of a rendering
	Output int           // bytes of the output, and of each intermediate text
}

// share is the limit of all texts and lists of a rendering, in units of Limits.Output.
const share = 32

// Template is a translated template. A Template is safe for concurrent use.
type Template struct {
	compiled *jinja.Template
	texts    []string
	marks    []mark
}

// Compile translates a template.
func Compile(src string) (*Template, error) {
	if len(src) > maxSource {
		return nil, fail(mark{1, 1}, "the template has %d bytes, at most %d are read", len(src), maxSource)
	}
	tokens, err := lex(src)
	if err != nil {
		return nil, err
	}
	p, err := parse(tokens)
	if err != nil {
		return nil, err
	}
	compiled, err := jinja.Compile(p.out.String())
	if err != nil {
		return nil, fail(mark{1, 1}, "the translated template: %v", err)
	}
	return &Template{compiled, p.texts, p.marks}, nil
}

// Value is a value of a template.
type Value = jinja.Value

// run is one rendering.
type run struct {
	t        *Template
	limits   Limits
	now      func() time.Time
	deadline time.Time
	steps    int
	made     int // bytes of all texts and lists
	written  int // bytes of output outside of macros and of blocks whose output is a value
	inside   int // number of enclosing macros and blocks whose output is a value
	depth    int
	order    []string             // names of the named arguments of the current call
	spaces   map[*jinja.Dict]bool // namespaces
	tuples   map[*jinja.List]bool
	safe     map[*jinja.List]string // see safe.go
	err      error                  // limit error; ends the rendering
}

// Render returns the output of the template.
func (t *Template) Render(variables map[string]Value, limits Limits, now func() time.Time) (text string, err error) {
	r := &run{t: t, limits: limits, now: now, deadline: time.Now().Add(limits.Time), spaces: map[*jinja.Dict]bool{}, tuples: map[*jinja.List]bool{}, safe: map[*jinja.List]string{}}
	data := r.functions()
	for name, f := range r.globals() {
		data["v_"+name] = jinja.NewCallable(name, f)
	}
	for name, v := range variables {
		data["v_"+name] = v
	}
	defer func() {
		if p := recover(); p != nil {
			text, err = "", fmt.Errorf("%w: panic: %v", ErrRender, p)
		}
	}()
	text, err = t.compiled.RenderValues(data)
	if r.err != nil {
		err = r.err
	}
	if err != nil {
		var at *Error
		if !errors.As(err, &at) {
			err = fmt.Errorf("%w: %w", ErrRender, err)
		}
		return "", err
	}
	return text, nil
}

// function is a function that the translated template calls.
type function func(args []Value, named map[string]Value) (Value, error)

// at returns a function value for f. Before the call of f, safe texts become plain texts.
func (r *run) at(f func(args []Value) (Value, error)) Value {
	return r.named(func(args []Value, _ map[string]Value) (Value, error) { return f(r.plains(args)) })
}

// raw returns a function value for f. The arguments of f may be safe texts.
func (r *run) raw(f func(args []Value) (Value, error)) Value {
	return r.named(func(args []Value, _ map[string]Value) (Value, error) { return f(args) })
}

// named returns a function value for f. The first argument of the value is the number of a place. named adds the place to an
// error of f that has no place.
func (r *run) named(f function) Value {
	return jinja.NewCallable("function", func(args []Value, named map[string]Value) (Value, error) {
		place := r.t.marks[args[0].AsInt()]
		err := r.step(1)
		if err == nil {
			var v Value
			if v, err = f(args[1:], named); err == nil {
				return v, nil
			}
		}
		var inner *Error
		if errors.As(err, &inner) {
			return Value{}, err
		}
		kind := err
		if !errors.Is(err, ErrLimit) {
			if e := (*Exception)(nil); !errors.As(err, &e) {
				kind = ErrRender
			}
		}
		err = &Error{Line: place.line, Col: place.col, Text: err.Error(), Err: kind}
		if errors.Is(kind, ErrLimit) {
			r.err = err
		}
		return Value{}, err
	})
}

// step counts n units of work. About every 256 units, step checks the time limit.
func (r *run) step(n int) error {
	if r.err != nil {
		return r.err
	}
	before := r.steps
	r.steps += n
	if before>>8 != r.steps>>8 && time.Now().After(r.deadline) {
		return fmt.Errorf("%w: more than %v to render", ErrLimit, r.limits.Time)
	}
	return nil
}

// make counts n bytes of a text or list before its allocation, and checks the limits.
func (r *run) make(n int) error {
	if n > r.limits.Output {
		return fmt.Errorf("%w: a text or a list of more than %d bytes", ErrLimit, r.limits.Output)
	}
	if r.made += n; r.made > share*r.limits.Output || r.made < 0 {
		return fmt.Errorf("%w: more than %d bytes in all its texts", ErrLimit, share*r.limits.Output)
	}
	return r.step(n >> 10)
}

// write counts n bytes of output, and checks the limits.
func (r *run) write(n int) error {
	if r.inside == 0 {
		if r.written += n; r.written > r.limits.Output {
			return fmt.Errorf("%w: more than %d bytes of output", ErrLimit, r.limits.Output)
		}
	}
	return r.make(n)
}

func (r *run) text(s string) (Value, error) {
	if err := r.make(len(s)); err != nil {
		return Value{}, err
	}
	return jinja.NewString(s), nil
}

const itemBytes = 32

func (r *run) list(items []Value) (Value, error) {
	if err := r.make(len(items) * itemBytes); err != nil {
		return Value{}, err
	}
	return jinja.NewList(items), nil
}

func (r *run) tuple(items []Value) (Value, error) {
	v, err := r.list(items)
	if err == nil {
		r.tuples[v.AsList()] = true
	}
	return v, err
}

var empty = jinja.NewString("")

// arguments holds the arguments of a call in the template.
type arguments struct {
	list  []Value
	names []string
	named []Value
}

// split decodes the arguments of a call: the number of positional arguments, the positional arguments, then names and values.
func split(args []Value) arguments {
	n := int(args[0].AsInt())
	a := arguments{list: args[1 : 1+n]}
	for rest := args[1+n:]; len(rest) > 0; rest = rest[2:] {
		a.names = append(a.names, rest[0].AsString())
		a.named = append(a.named, rest[1])
	}
	return a
}

// bind returns the arguments in the order of the parameters. A missing argument is Undefined.
func (a arguments) bind(what string, params ...string) ([]Value, error) {
	if len(a.list) > len(params) {
		return nil, fmt.Errorf("%s takes at most %d arguments, %d are given", what, len(params), len(a.list))
	}
	out := make([]Value, len(params))
	copy(out, a.list)
next:
	for i, n := range a.names {
		for j, p := range params {
			if n == p {
				if j < len(a.list) {
					return nil, fmt.Errorf("%s: argument %s is given twice", what, quote(n))
				}
				out[j] = a.named[i]
				continue next
			}
		}
		return nil, fmt.Errorf("%s has no argument %s", what, quote(n))
	}
	return out, nil
}

// need is like bind, and returns an error if one of the first n parameters has no argument.
func (a arguments) need(n int, what string, params ...string) ([]Value, error) {
	out, err := a.bind(what, params...)
	if err != nil {
		return nil, err
	}
	for i := range n {
		if i >= len(a.list) && !contains(a.names, params[i]) {
			return nil, fmt.Errorf("%s needs the argument %s", what, params[i])
		}
	}
	return out, nil
}

func contains(list []string, s string) bool {
	for _, l := range list {
		if l == s {
			return true
		}
	}
	return false
}

// functions returns the functions that the translated template calls.
func (r *run) functions() map[string]Value {
	leave := func(n int) Value {
		return jinja.NewCallable("function", func([]Value, map[string]Value) (Value, error) {
			r.inside += n
			return empty, nil
		})
	}
	return map[string]Value{
		"l_enter": leave(1),
		"l_leave": leave(-1),
		"l_text": r.at(func(args []Value) (Value, error) {
			s := r.t.texts[args[0].AsInt()]
			return jinja.NewString(s), r.write(len(s))
		}),
		"l_out": r.at(func(args []Value) (Value, error) {
			s, err := r.string(args[0])
			if err != nil {
				return Value{}, err
			}
			return jinja.NewString(s), r.write(len(s))
		}),
		"l_tick":  r.at(func([]Value) (Value, error) { return empty, nil }),
		"l_float": r.at(func(args []Value) (Value, error) { return jinja.NewFloat(parseFloat(args[0].AsString())), nil }),
		"l_iter": r.at(func(args []Value) (Value, error) {
			items, err := r.iterate(args[0])
			if err != nil {
				return Value{}, err
			}
			return jinja.NewList(items), nil
		}),
		"l_unpack": r.at(func(args []Value) (Value, error) {
			items, err := r.iterate(args[1])
			if err != nil {
				return Value{}, err
			}
			if n := int(args[0].AsInt()); len(items) != n {
				return Value{}, fmt.Errorf("%d values for %d names", len(items), n)
			}
			return jinja.NewList(items), nil
		}),
		"l_list":  r.raw(func(args []Value) (Value, error) { return r.list(args) }),
		"l_tuple": r.raw(func(args []Value) (Value, error) { return r.tuple(args) }),
		"l_push": r.raw(func(args []Value) (Value, error) {
			args[0].AsList().Append(args[1])
			return empty, r.make(itemBytes)
		}),
		"l_dict": r.raw(func(args []Value) (Value, error) {
			d := jinja.NewDict()
			for i := 0; i < len(args); i += 2 {
				k, err := keyOf(r.plain(args[i]))
				if err != nil {
					return Value{}, err
				}
				d.AsDict().Set(k, args[i+1])
			}
			return d, r.make(len(args) * itemBytes)
		}),
		"l_store": r.raw(func(args []Value) (Value, error) {
			if !args[0].IsDict() || !r.spaces[args[0].AsDict()] {
				return Value{}, fmt.Errorf("an attribute of %s can't be set, of a namespace alone", kindOf(args[0]))
			}
			return args[1], r.storable(args[1], 0)
		}),
		"l_op": r.raw(func(args []Value) (Value, error) {
			if len(args) == 2 {
				return r.unary(args[0].AsString(), r.plain(args[1]))
			}
			return r.binary(args[0].AsString(), args[1], args[2])
		}),
		"l_attr":  r.at(func(args []Value) (Value, error) { return r.attribute(args[1], args[0].AsString()) }),
		"l_item":  r.at(func(args []Value) (Value, error) { return r.item(args[0], args[1]) }),
		"l_slice": r.raw(func(args []Value) (Value, error) { return r.slice(args[0], args[1], args[2], args[3]) }),
		"l_filter": r.raw(func(args []Value) (Value, error) {
			return r.filter(args[0].AsString(), args[1], split(args[2:]))
		}),
		"l_test": r.at(func(args []Value) (Value, error) {
			ok, err := r.test(args[0].AsString(), args[1], split(args[2:]))
			return jinja.NewBool(ok), err
		}),
		"l_method": r.raw(func(args []Value) (Value, error) {
			return r.method(args[1], args[0].AsString(), split(args[2:]))
		}),
		"l_call": r.raw(func(args []Value) (Value, error) { return r.call(args[0], split(args[1:]), nil) }),
		"l_block": r.named(func(args []Value, named map[string]Value) (Value, error) {
			caller := named["caller"]
			v, err := r.call(args[0], split(args[1:]), &caller)
			if err != nil {
				return Value{}, err
			}
			s, err := r.string(v)
			if err != nil {
				return Value{}, err
			}
			return jinja.NewString(s), r.write(len(s))
		}),
		"l_macro": jinja.NewCallable("function", func(args []Value, _ map[string]Value) (Value, error) {
			return r.macro(args[0].AsString(), args[1]), nil
		}),
		"l_params": r.at(r.params),
		"l_arg": jinja.NewCallable("function", func(args []Value, _ map[string]Value) (Value, error) {
			v, _ := argument(args)
			return v, nil
		}),
		"l_given": jinja.NewCallable("function", func(args []Value, _ map[string]Value) (Value, error) {
			_, ok := argument(args)
			return jinja.NewBool(ok), nil
		}),
	}
}

// macro returns a macro value with ordinary arguments. The translated macro inner has one parameter that holds all arguments.
func (r *run) macro(name string, inner Value) Value {
	return jinja.NewCallable(name, func(args []Value, named map[string]Value) (Value, error) {
		rest := jinja.NewDict()
		var caller map[string]Value
		for n, v := range named {
			if n == "caller" {
				caller = map[string]Value{n: v}
			} else {
				rest.AsDict().Set(n, v)
			}
		}
		return inner.AsCallable().Fn([]Value{jinja.NewList([]Value{jinja.NewList(args), rest})}, caller)
	})
}

// params checks the arguments of a macro.
func (r *run) params(args []Value) (Value, error) {
	given, params := args[1].AsList(), args[2:]
	list, named := given.Get(0).AsList(), given.Get(1).AsDict()
	if list.Len() > len(params) {
		return Value{}, fmt.Errorf("macro %s takes %d arguments, %d are given", quote(args[0].AsString()), len(params), list.Len())
	}
next:
	for _, n := range named.Keys {
		for i, p := range params {
			if p.AsString() == n {
				if i < list.Len() {
					return Value{}, fmt.Errorf("macro %s: argument %s is given twice", quote(args[0].AsString()), quote(n))
				}
				continue next
			}
		}
		return Value{}, fmt.Errorf("macro %s has no argument %s", quote(args[0].AsString()), quote(n))
	}
	return empty, nil
}

// argument returns the argument of a macro with the given position and name.
func argument(args []Value) (Value, bool) {
	i, given := int(args[0].AsInt()), args[2].AsList()
	if list := given.Get(0).AsList(); i < list.Len() {
		return list.Get(i), true
	}
	return given.Get(1).AsDict().Get(args[1].AsString())
}

// call calls a macro or a function of the template.
func (r *run) call(f Value, args arguments, caller *Value) (Value, error) {
	if !f.IsCallable() || special(f) {
		return Value{}, fmt.Errorf("%s is no function", kindOf(f))
	}
	if r.depth++; r.depth > r.limits.Depth {
		return Value{}, fmt.Errorf("%w: more than %d calls inside each other", ErrLimit, r.limits.Depth)
	}
	r.inside++
	defer func() { r.depth--; r.inside-- }()
	named := map[string]Value{}
	for i, n := range args.names {
		named[n] = args.named[i]
	}
	if _, ok := named["caller"]; ok {
		return Value{}, errors.New("the argument caller is not supported")
	}
	if caller != nil {
		named["caller"] = *caller
	}
	r.order = args.names
	return f.AsCallable().Fn(args.list, named)
}

// storable returns an error for a value that contains a namespace, or that is nested too deeply. A namespace in a namespace could
// contain itself.
func (r *run) storable(v Value, depth int) error {
	if depth > maxValue {
		return fmt.Errorf("%w: a value of more than %d levels", ErrLimit, maxValue)
	}
	if err := r.step(1); err != nil {
		return err
	}
	switch {
	case v.IsDict():
		if r.spaces[v.AsDict()] {
			return errors.New("a namespace in a namespace is not supported")
		}
		for _, k := range v.AsDict().Keys {
			if err := r.storable(v.AsDict().Data[k], depth+1); err != nil {
				return err
			}
		}
	case v.IsList():
		for _, item := range v.AsList().Items {
			if err := r.storable(item, depth+1); err != nil {
				return err
			}
		}
	}
	return nil
}
