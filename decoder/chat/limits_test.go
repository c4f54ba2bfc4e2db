package chat

import (
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"
)

// render returns the output of a template for a conversation without messages.
func render(src string, opts Options) (string, error) {
	templates, err := New(map[string]string{"default": src}, opts)
	if err != nil {
		return "", err
	}
	return templates.Render(Conversation{Messages: []Message{{Role: "user", Content: "x"}}})
}

// TestLimits checks that templates with unbounded time, memory or stack soon end with an error, and leave no goroutine.
func TestLimits(t *testing.T) {
	before := runtime.NumGoroutine()
	const ten = "{% for i in range(100000) %}"
	for _, test := range []struct{ name, src, limit string }{
		{"nested loops", strings.Repeat(ten, 5) + strings.Repeat("{% endfor %}", 5), "to render"},
		{"nested loops that write", strings.Repeat(ten, 3) + strings.Repeat("0123456789", 100) + strings.Repeat("{% endfor %}", 3), "output"},
		{"a macro that calls itself", "{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(0) }}", "calls inside"},
		{"two macros that call each other", "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ g() }}", "calls inside"},
		{"a macro that calls itself twice", "{% macro f(x) %}{% if x %}{{ f(x - 1) }}{{ f(x - 1) }}{% endif %}{% endmacro %}{{ f(90) }}", "to render"},
		{"a caller that calls", "{% macro f() %}{{ caller() }}{% endmacro %}{% macro g() %}{% call f() %}{{ g() }}{% endcall %}{% endmacro %}{{ g() }}", "calls inside"},
		{"a text that doubles", "{% set ns = namespace(s='x') %}{% for i in range(100) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "bytes"},
		{"a list that doubles", "{% set ns = namespace(s=[1]) %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", "bytes"},
		{"a list of lists, written", "{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}", ""},
		{"a list of lists, as JSON", strings.Repeat("{% set s = [s, s] %}", 60) + "{{ s is defined }}{{ [1] + s | tojson | list }}", ""},
		{"lists that are equal", "{% set a = [1] %}{% set b = [1] %}" + strings.Repeat("{% set a = [a, a] %}{% set b = [b, b] %}", 60) + "{{ a == b }}", "to render"},
		{"a list in itself", "{% set ns = namespace(s=[1]) %}{% for i in range(100000) %}{% set ns.s = [ns.s] %}{% endfor %}", "levels"},
		{"a deep list, compared", "{% macro f(x, n) %}{{ f([x], n - 1) if n else (x == x) }}{% endmacro %}{{ f([], 300) }}", "calls inside"},
		{"repeat", "{{ 'x' * 1000000000000 }}", "bytes"},
		{"repeat of a list", "{{ [1] * 1000000000 }}", "bytes"},
		{"repeat of what is empty", "{{ ('' * 9223372036854775807) ~ ([] * 9223372036854775807) }}ok", "none"},
		{"range", "{{ range(1000000) }}", "range"},
		{"indent", "{{ 'a\\nb' | indent(1000000000000) }}", "bytes"},
		{"indent of JSON", "{{ [1] | tojson(indent=1000000000) }}", "bytes"},
		{"center", "{{ 'a'.center(10000000000) }}{{ 'a' | center(1000000000) }}", "bytes"},
		{"replace", "{% set a = 'a' * 100000 %}{{ a | replace('a', a) }}", "bytes"},
		{"join", "{% set a = 'a' * 1000000 %}{{ range(100000) | join(a) }}", "bytes"},
		{"join of a list", "{{ ([ 'a' * 1000000 ] * 1000) | join }}", "bytes"},
		{"escape", "{% set a = '<' * 1000000 %}" + strings.Repeat("{% set a = a | e | string ~ '' %}{% set a = a ~ a %}", 30), ""},
		{"format", "{% set ns = namespace(s='{}{}') %}{% for i in range(50) %}{% set ns.s = ns.s.format(ns.s, ns.s) | replace('{}', ns.s) %}{% set ns.s = ns.s ~ '{}{}' %}{% endfor %}", ""},
		{"characters to strip", "{% set a = 'ab' * 1000000 %}{% for i in range(20) %}{% set x = a.strip(a) %}{% endfor %}", "none"},
		{"split from the right", "{{ ('a ' * 100000).rsplit(none, 100000) | length }}", "none"},
		{"split", "{{ ('a,' * 1000000).split(',') | length }}{{ ('a ' * 1000000).split() | length }}", "bytes"},
		{"sort of long texts", "{% set a = 'A' * 1000000 %}{% set l = [a] * 100000 %}{{ l | sort | length }}", "bytes"},
		{"digits", "{{ ('9' * 4000000) | int(0) }}", "64 bits"},
		{"batch", "{{ [1] | batch(1000000, 'x') | list | length }}", "bytes"},
		{"powers", "{{ 1 ** 9223372036854775807 }}{{ (-1) ** 9223372036854775807 }}{{ (-1) ** 2 }}{{ 0 ** 5 }}{{ 0 ** 0 }}{{ (-2) ** 62 }}", "none"},
		{"texts that are let go", ten + "{% set s = 'x' * 1000000 %}{% endfor %}", "bytes"},
		{"a long text, many times", "{% set s = 'x' * 1000000 %}" + ten + "{% if 'y' in s %}{% endif %}{% endfor %}", "to render"},
	} {
		begin := time.Now()
		limit := 100 * time.Millisecond
		if test.limit != "" && test.limit != "to render" {
			limit = time.Minute // another limit is reached first, even on a busy machine
		}
		out, err := render(test.src, Options{MaxTime: limit, MaxOutput: 4 << 20})
		took := time.Since(begin)
		switch {
		case test.limit == "none":
			if err != nil {
				t.Errorf("%s: %v", test.name, err)
			}
		case err == nil && test.limit != "", len(out) > 4<<20:
			t.Errorf("%s: no error, %d bytes", test.name, len(out))
		case test.limit != "" && (!errors.Is(err, ErrLimit) && test.limit != "64 bits" || !strings.Contains(err.Error(), test.limit) || !strings.Contains(err.Error(), "line 1, column ")):
			t.Errorf("%s: %v", test.name, err)
		}
		if took > 20*time.Second {
			t.Errorf("%s: took %v", test.name, took)
		}
	}
	if after := runtime.NumGoroutine(); after > before {
		t.Errorf("%d goroutines before, %d after", before, after)
	}
	// Options raise the limits.
	if out, err := render("{% macro f(x) %}{% if x %}{{ f(x - 1) }}{% endif %}.{% endmacro %}{{ f(150) }}", Options{MaxDepth: 200}); err != nil || out != strings.Repeat(".", 151) {
		t.Errorf("a macro 150 deep: %d bytes, %v", len(out), err)
	}
	if out, err := render("{{ 'x' * 1000 }}", Options{MaxOutput: 999}); !errors.Is(err, ErrLimit) {
		t.Errorf("1000 bytes of 999: %d bytes, %v", len(out), err)
	}
	if _, err := New(map[string]string{"default": ""}, Options{MaxDepth: -1}); err == nil {
		t.Error("a negative limit is taken")
	}
}

// TestRefused checks that an unsupported feature is an error with a place. Errors of the library have no place, so the library
// must not report the feature.
func TestRefused(t *testing.T) {
	for _, test := range []struct{ src, want string }{
		{"a\n{{ x | nofilter }}", `line 2, column 8: filter "nofilter" is not supported`},
		{"{{ x is notest }}", `line 1, column 9: test "notest" is not supported`},
		{"{% include 'x' %}", `line 1, column 4: statement "include" is not supported`},
		{"{% for i in x recursive %}{% endfor %}", "recursive loops are not supported"},
		{"{% with a = 1 %}{% endwith %}", `statement "with" is not supported`},
		{"é{{ f(*x) }}", "line 1, column 7: arguments in a list"},
		{"{{ 'a }}", "line 1, column 4: a string begins here and has no end"},
		{"{{ a ! b }}", `line 1, column 6: unexpected character '!'`},
		{"{# a", "line 1, column 1: a comment begins here"},
		{"{% raw %} {% endra %}", "raw begins here"},
		{"{{ a", "a tag begins here"},
		{"{{ (a] }}", `line 1, column 6: unexpected "]"`},
		{"{% if a %}", "the template ends"},
		{"{% endif %}", `statement "endif" is not supported`},
		{"{% break %}", `"break" is not in a loop`},
		{"{% for i in x %}{% set y %}{% break %}{% endset %}{% endfor %}", `"break" is not in a loop`},
		{"{% for loop in x %}{% endfor %}", `"loop" can't be assigned`},
		{"{{ x.__class__ }}", `attribute "__class__" is not accessible`},
		{"{{ loop.depth }}", "loop.depth is not supported"},
		{"{{ 99999999999999999999 }}", "is no number of 64 bits"},
		{"{{ '\\ud800' }}", "is no character"},
		{"{{ a b }}", `line 1, column 6: "b", want "}}"`},
		{"{{ " + strings.Repeat("(", 300) + strings.Repeat(")", 300) + " }}", "inside each other"},
		{"{{ " + strings.Repeat("-", 300) + "1 }}", "inside each other"},
		{"{{ 1" + strings.Repeat("+1", 600) + " }}", "operators"},
		{strings.Repeat("{% if 1 %}", 200), "inside each other"},
		{strings.Repeat(" ", 2<<20), "at most"},
		{"\xff", "not UTF-8"},
		// At rendering.
		{"{{ nofunction() }}", "line 1, column 14: an undefined value is no function"},
		{"\n {{ 'a'.encode() }}", `line 2, column 15: method "encode" of a text is not supported`},
		{"{% set a = [] %}{{ a.append(1) }}", `method "append" of a list is not supported`},
		{"{{ a.b }}", `attribute "b" of an undefined value`},
		{"{{ 1 / 0 }}", "division by zero"},
		{"{{ 9223372036854775807 + 1 }}", "more than 64 bits"},
		{"{{ 'a' + 1 }}", "line 1, column 8: a text + an integer"},
		{"{{ {[1]: 2} }}", "a key is a list"},
		{"{% set x = {} %}{% set x.y = 1 %}", "of a namespace alone"},
		{"{% set n = namespace() %}{% set n.n = [n] %}", "a namespace in a namespace"},
		{"{% macro f(a) %}{% endmacro %}{{ f(1, 2) }}", `macro "f" takes 1 arguments, 2 are given`},
		{"{% macro f(a) %}{% endmacro %}{{ f(b=1) }}", `macro "f" has no argument "b"`},
		{"{{ strftime_now('%Q') }}", "directive"},
		{"{{ none | tojson(indent=[]) }}{{ missing | tojson }}", "indent is a list"},
		{"{% for a, b in [[1]] %}{% endfor %}", "1 values for 2 names"},
	} {
		out, err := render(test.src, Options{})
		if err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), "line ") {
			t.Errorf("%.60q: %q, %v, want %s", test.src, out, err, test.want)
		} else if !errors.Is(err, ErrSyntax) && !errors.Is(err, ErrRender) {
			t.Errorf("%.60q: %v is neither ErrSyntax nor ErrRender", test.src, err)
		}
	}
	var e *Exception
	if _, err := render("\n{{ raise_exception('no ' ~ 'way') }}", Options{}); !errors.As(err, &e) || e.Message != "no way" || !strings.Contains(err.Error(), "line 2, column 19") {
		t.Errorf("raise_exception: %v", err)
	}
}

// FuzzTemplate checks that no template panics or exceeds its limits.
func FuzzTemplate(f *testing.F) {
	for _, src := range []string{"{{ messages[0].content }}", "{% for a, b in x.items() if a %}{{ loop.index }}{% else %}{% endfor %}", "{% macro f(a, b=1) %}{{ a ~ b }}{% endmacro %}{% call f(1) %}{% endcall %}",
		"{% set ns = namespace(a=[]) %}{% set ns.a = ns.a + [1] %}{{ ns.a | tojson(indent=2) }}", "{% raw %}{{{% endraw %}{#- -#}{%- set x -%} y {%- endset -%}", "{{ 'a%s' % 1 }}{{ -1 ** 2 // 3 }}{{ x is not in [1] }}",
		"{{ ('a' | safe) + '<' * 3 }}{{ {1: 2}[1] }}{{ [3, 1] | sort(reverse=true) | map('string') | join(',') }}", "{{ '\\x41\\u00e9'.split('A', 1)[0][::-1] }}", "{{ messages | selectattr('role', 'eq', 'user') | list | last }}"} {
		f.Add(src)
	}
	f.Fuzz(func(t *testing.T, src string) {
		begin := time.Now()
		out, err := render(src, Options{MaxTime: 100 * time.Millisecond, MaxOutput: 1 << 20, Now: func() time.Time { return clock }})
		if len(out) > 1<<20 || time.Since(begin) > 20*time.Second {
			t.Errorf("%d bytes in %v", len(out), time.Since(begin))
		}
		if err != nil && (strings.Contains(err.Error(), "panic") || strings.Contains(err.Error(), "translated template") || !strings.Contains(err.Error(), "line ")) {
			t.Error(err)
		}
	})
}

// FuzzMessage checks that decoding and encoding a message gives the same JSON value.
func FuzzMessage(f *testing.F) {
	for _, s := range []string{`{"role":"user","content":"x"}`, `{"content":null,"role":"a","extra":[1,{"b":2,"a":1e3}],"tool_calls":[{"function":{"arguments":{},"name":"f"},"id":"1"}]}`, `{"content":[{"type":"text","text":"<"}]}`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		var m Message
		if json.Unmarshal([]byte(s), &m) != nil {
			return
		}
		data, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		var again Message
		if err := json.Unmarshal(data, &again); err != nil {
			t.Fatalf("%s: %v", data, err)
		}
		if twice, err := json.Marshal(again); err != nil || string(twice) != string(data) {
			t.Fatalf("%s, then %s: %v", data, twice, err)
		}
	})
}

func ExampleTemplates_Render() {
	const chatml = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
	templates, err := New(map[string]string{"default": chatml}, Options{})
	if err != nil {
		panic(err)
	}
	text, err := templates.Render(Conversation{Messages: []Message{{Role: "user", Content: "Hello"}}, AddGenerationPrompt: true})
	fmt.Print(text, err)
	stops, err := templates.EndTokens([]string{"<|im_start|>", "<|im_end|>"})
	fmt.Print("\n", stops, err)
	// Output:
	// <|im_start|>user
	// Hello<|im_end|>
	// <|im_start|>assistant
	// <nil>
	// [<|im_end|>] <nil>
}

// TestCompileTime checks that templates of nearly a megabyte compile in linear time. Quadratic time would be 10 s or more.
func TestCompileTime(t *testing.T) {
	var names strings.Builder
	for i := range 60000 {
		fmt.Fprintf(&names, "{%%set a%d=1%%}", i)
	}
	for name, src := range map[string]string{
		"branches": "{% if 0 %}" + strings.Repeat("{%elif 0%}", 90000) + "{% endif %}",
		"strings":  "{{ " + strings.Repeat("'a'", 330000) + " }}",
		"names":    names.String(),
	} {
		start := time.Now()
		if _, err := New(map[string]string{"default": src}, Options{}); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if d := time.Since(start); d > 6*time.Second {
			t.Errorf("%s: %v", name, d)
		} else {
			t.Logf("%s: %v", name, d)
		}
	}
}
