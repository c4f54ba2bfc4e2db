package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/decoder/chat"
)

// Templates: text alone; calls, whose ids have nine characters, and whose results follow in the order of the calls; calls with arguments that are text.
const (
	textTools  = "{% for t in tools %}{{ t.name }} {% endfor %}{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
	idTools    = "{% for t in tools %}{{ t.name }} {% endfor %}{% for m in messages %}{% if m.role == 'tool' %}{% if m.tool_call_id is not defined or m.tool_call_id|length != 9 or m.tool_call_id == before %}{{ raise_exception('no id') }}{% endif %}[result {{ m.name }}|{{ m.content }}]{% elif m.tool_calls %}[{{ m.content }}{% for c in m.tool_calls %}|{{ c.function.name }} {{ c.function.arguments['a'] }} {{ c.id|length }}{% endfor %}]{% elif m.role == 'assistant' and '{' in m.content %}{{ raise_exception('a call in text') }}{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
	textIDs    = "{% for t in tools %}{{ t.name }} {% endfor %}{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}[{{ c.function.name + c.function.arguments }}]{% endfor %}{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
	silentTool = "{% for t in tools %}{{ t.name }} {% endfor %}{% for m in messages %}{% if m.role != 'tool' %}[{{ m.content }}]{% endif %}{% endfor %}"
)

// TestChatTool: the results of /tool are messages of the template, in the form that the template takes, and the model goes on.
func TestChatTool(t *testing.T) {
	const (
		one   = `<c>{"name": "king", "arguments": {"a": 1}}</c>`
		two   = `Well <c>{"name": "king", "arguments": {"a": 1}}</c> <c>{"name": "king", "arguments": {"a": 2}}</c>`
		begin = "king girl "
	)
	tools := filepath.Join(t.TempDir(), "tools.json")
	if err := os.WriteFile(tools, []byte(`[{"name": "king"}, {"type": "function", "name": "girl"}]`), 0o666); err != nil {
		t.Fatal(err)
	}
	play := func(template, answer string, lines ...string) (s *session, text, errs string) {
		t.Helper()
		s, _, e := newSession(t, "", "-m", writeChat(t, template), "-tools", tools, "-n", "4", "-exact")
		s.std.in = strings.NewReader("A dog\n")
		if err := s.run(t.Context()); err != nil || len(s.messages) != 2 {
			t.Fatal(err)
		}
		s.messages[1].Content, s.turns[0].answer = answer, answer // as if the model had written this
		s.std.in = strings.NewReader(strings.Join(lines, "\n"))
		err := s.run(t.Context())
		if (err != nil) != (s.unanswered > 0) {
			t.Errorf("%v, %d", err, s.unanswered)
		}
		text, err = s.templates.Render(chat.Conversation{Messages: s.messages, Tools: s.tools})
		if err != nil {
			t.Error(err)
		}
		return s, text, e.String()
	}
	for _, c := range []struct {
		name, template, answer string
		lines                  []string
		want                   string // *: what the model writes
		said                   string
		turns                  int
	}{
		{"text", textTools, one, []string{"/tool king 42"}, "[user|A dog][assistant|" + one + "][tool|42][assistant|*]", "", 2},
		{"text and JSON", textTools, one, []string{`/tool king   {"x":  [1, 2]}  `, "And"}, "[user|A dog][assistant|" + one + `][tool|{"x":  [1, 2]}][assistant|*][user|And][assistant|*]`, "", 3},
		{"two lines", textTools, one, []string{"/tool king 4\\", "2"}, "[user|A dog][assistant|" + one + "][tool|4\n2][assistant|*]", "", 2},
		{"no call", textTools, "A king?", []string{"/tool girl 42"}, "[user|A dog][assistant|A king?][tool|42][assistant|*]", "", 2},
		{"calls", idTools, two, []string{"/tool king 41", "/tool king 42"}, "[A dog][Well|king 1 9|king 2 9][result king|41][result king|42][*]", "1 of 2 results; /tool gives the next: king", 2},
		{"calls of texts", textIDs, one, []string{"/tool king 42"}, `[A dog][king{"a": 1}][42][*]`, "", 2},
		{"regen", idTools, one, []string{"/tool king 42", "/regen"}, "[A dog][|king 1 9][result king|42][*]", "", 2},
		{"undo", idTools, one, []string{"/tool king 42", "/undo", "/tool king 43"}, "[A dog][|king 1 9][result king|43][*]", `dropped "42" and its answer`, 2},
		{"undone", textTools, one, []string{"/tool king 42", "/undo"}, "[user|A dog][assistant|" + one + "]", `dropped "42" and its answer`, 1},
		{"undo one of two", idTools, two, []string{"/tool king 40", "/undo", "/tool king 41", "/tool king 42"}, "[A dog][Well|king 1 9|king 2 9][result king|41][result king|42][*]", "dropped 1 results", 2},
		{"back", textTools, two, []string{"/fork", "/tool king 40", "/back", "/tool king 41", "/tool king 42"}, "[user|A dog][assistant|" + two + "][tool|41][tool|42][assistant|*]", "", 2},
		{"another tool", textTools, one, []string{"/tool girl 42", "/tool king 42"}, "[user|A dog][assistant|" + one + "][tool|42][assistant|*]", "no call of girl without a result; results are missing for king", 2},
		{"no tool", textTools, one, []string{"/tool dog 42"}, "[user|A dog][assistant|" + one + "]", `no tool "dog"; -tools has king, girl`, 1},
		{"no result", textTools, one, []string{"/tool king ", "/tool"}, "[user|A dog][assistant|" + one + "]", "/tool NAME RESULT", 1},
		{"no answer", textTools, one, []string{"/clear", "/tool king 42", "/regen"}, "", "there is no answer that calls a tool", 0},
		{"a message in between", textTools, two, []string{"/tool king 41", "And", "/tool king 42"}, "[user|A dog][assistant|" + two + "][tool|41][tool|42][assistant|*]", "the answer's calls have 1 results, and not all", 2},
		{"the end", textTools, two, []string{"/tool king 41"}, "[user|A dog][assistant|" + two + "]", "the conversation ends without results for all calls", 1},
		{"no place", silentTool, one, []string{"/tool king 41"}, "[A dog][" + one + "]", "no place for results of tools", 1},
	} {
		s, text, errs := play(c.template, c.answer, c.lines...)
		want := ""
		next := s.messages
		for i, part := range strings.Split(begin+c.want, "*") {
			if i > 0 { // the next answer that the model wrote
				at := slices.IndexFunc(next, func(m chat.Message) bool {
					return m.Role == "assistant" && m.ToolCalls == nil && m.Content != c.answer
				})
				if at < 0 {
					t.Errorf("%s: the model did not go on: %q", c.name, text)
					break
				}
				want += next[at].Content
				next = next[at+1:]
			}
			want += part
		}
		if text != want || len(s.turns) != c.turns || !strings.Contains(errs, c.said) {
			t.Errorf("%s: %q after %d turns, %s; want %q, %q", c.name, text, len(s.turns), errs, want, c.said)
		}
	}
}

// TestChatRegen: /regen answers the last message again, with another seed.
func TestChatRegen(t *testing.T) {
	s, out, errs := newSession(t, "/regen\nA king.\n/regen\n/regen\n", "-m", writeChat(t, plainTemplate), "-n", "12", "-exact", "-temp", "1", "-s", "1")
	if err := s.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	answers := strings.Split(out.String(), "\n")
	if len(answers) != 4 || answers[0] == answers[1] || answers[1] == answers[2] || answers[0] == answers[2] || len(s.turns) != 1 ||
		!slices.Equal(s.contents(), []string{"A king.", answers[2]}) || !strings.Contains(errs.String(), "/regen: there is no answer") {
		t.Errorf("%q, %q, %s", answers, s.contents(), errs)
	}
}

// TestChatCache: a conversation is written to the file of -prompt-cache, and another one with the same beginning does not compute it.
func TestChatCache(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cache")
	dir := writeChat(t, plainTemplate)
	play := func(in string, args ...string) (out string, rows int, errs string) {
		t.Helper()
		s, o, e := newSession(t, in, append([]string{"-m", dir, "-n", "8", "-exact", "-sys", story, "-prompt-cache", file}, args...)...)
		if err := s.run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := s.save(t.Context()); err != nil {
			t.Fatal(err)
		}
		return o.String(), s.engine.Stats().Rows, e.String()
	}
	play("")
	if _, err := os.Stat(file); !os.IsNotExist(err) {
		t.Errorf("a conversation without answers: %v", err)
	}
	want, all, _ := play("A king.\nA girl.\n")
	saved, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	again, rows, _ := play("A king.\nA girl.\n")
	if again != want || rows > 20 || rows >= all-18 {
		t.Errorf("%q, computed %d; at first %q, %d", again, rows, want, all)
	}
	if now, err := os.ReadFile(file); err != nil || string(now) != string(saved) {
		t.Errorf("the file is another one: %v", err)
	}
	// The file has the conversation after /undo.
	if _, rows, _ := play("A dog.\nA king.\n/undo\n"); rows >= all {
		t.Errorf("computed %d, at first %d", rows, all)
	}
	if _, rows, _ := play("A dog.\n"); rows > 9 {
		t.Errorf("computed %d", rows)
	}
	// leanlm chat itself reads and writes the file.
	other := filepath.Join(filepath.Dir(file), "other")
	for range 2 {
		status, out, errs := leanlm(t, "A king.\nA girl.\n", "chat", "-m", dir, "-n", "8", "-exact", "-sys", story, "-prompt-cache", other)
		if status != 0 || out != want {
			t.Errorf("%d, %q, %s", status, out, errs)
		}
	}
	if now, err := os.ReadFile(other); err != nil || len(now) != len(saved) {
		t.Errorf("%d bytes, want %d: %v", len(now), len(saved), err)
	}
	if _, _, errs := play(strings.Repeat("A dog.\n", 4), "-prompt-cache", file+"2", "-c", "40", "-keep", "2", "-context-shift"); !strings.Contains(errs, "dropped") {
		t.Errorf("%s", errs)
	}
	if err := os.WriteFile(other, saved[:len(saved)/2], 0o666); err != nil {
		t.Fatal(err)
	}
	for want, args := range map[string][]string{
		"ReadSequence": {"-prompt-cache", other}, "is of ": {"-prompt-cache", file, "-exact=false", "-ctk", "bf16"}, "-c makes the context larger": {"-prompt-cache", file, "-c", "20"},
		"no regular file": {"-prompt-cache", dir},
	} {
		status, out, errs := leanlm(t, "A king.\n", append([]string{"chat", "-m", dir, "-exact"}, args...)...)
		if status != exitError || out != "" || !strings.Contains(errs, "-prompt-cache "+args[1]+": ") || !strings.Contains(errs, want) {
			t.Errorf("%s: %d, %q, %s", want, status, out, errs)
		}
		if way := "delete the file, or name another one"; (want == "ReadSequence" || want == "is of ") && !strings.Contains(errs, way) {
			t.Errorf("%s, want %s", errs, way)
		}
	}
	if status, _, errs := leanlm(t, "", "chat", "-prompt-cache", ""); status != exitUsage || !strings.Contains(errs, "-prompt-cache needs a file") {
		t.Errorf("%d, %s", status, errs)
	}
}
