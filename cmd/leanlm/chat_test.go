package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/decoder/tokenizer"
)

// writeChat writes the shipped model with a chat template.
func writeChat(t testing.TB, template string) string {
	dir := writeShipped(t)
	if err := os.WriteFile(filepath.Join(dir, "chat_template.jinja"), []byte(template), 0o666); err != nil {
		t.Fatal(err)
	}
	return dir
}

const plainTemplate = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}So{% endif %}"

// newSession opens a conversation.
func newSession(t testing.TB, in string, args ...string) (s *session, out, errs *bytes.Buffer) {
	t.Helper()
	out, errs = new(bytes.Buffer), new(bytes.Buffer)
	s = &session{std: streams{strings.NewReader(in), out, errs}}
	t.Cleanup(func() {
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
	if err := s.open(args); err != nil {
		t.Fatal(err)
	}
	return s, out, errs
}

// contents returns the texts of a conversation.
func (s *session) contents() (all []string) {
	for _, m := range s.messages {
		all = append(all, m.Content)
	}
	return all
}

// TestChat: an answer is the continuation of the template's text, and later messages follow the whole conversation.
func TestChat(t *testing.T) {
	dir := writeChat(t, plainTemplate)
	status, out, errs := leanlm(t, "Once upon a time.\n\nThe king slept.\n", "chat", "-m", dir, "-n", "12", "-exact", "-sys", "A story.")
	answers := strings.Split(out, "\n")
	if status != 0 || len(answers) != 3 || answers[0] == "" || answers[1] == "" || answers[2] != "" {
		t.Fatalf("%d, %q, %s", status, out, errs)
	}
	// The same conversation, its first turn in one message, and with guesses.
	second := "A story. Once upon a time. " + answers[0] + " The king slept."
	_, last, _ := leanlm(t, second+"\n", "chat", "-m", dir, "-n", "12", "-exact", "-draft", "4")
	if last != answers[1]+"\n" {
		t.Errorf("the second answer is %q, and in one message %q", answers[1], last)
	}
	_, stopped, errs := leanlm(t, second+"\n", "chat", "-m", dir, "-n", "12", "-exact", "-stop", last[3:5], "-stats")
	if want := last[:strings.Index(last, last[3:5])] + "\n"; stopped != want || !strings.Contains(errs, " were computed; the context has 2048") {
		t.Errorf("%q, want %q; %s", stopped, want, errs)
	}
	if status, _, err := leanlm(t, "x\n", "chat"); status != exitError || !strings.Contains(err, "no chat template") {
		t.Errorf("without a template: %d, %s", status, err)
	}
	if status, _, err := leanlm(t, "", "chat", "-n", "-1"); status != exitUsage || !strings.Contains(err, "-n is -1") {
		t.Errorf("%d, %s", status, err)
	}
}

// TestChatCommands: after commands the conversation is one with the messages that are left, and answers are those of that
// conversation.
func TestChatCommands(t *testing.T) {
	flags := []string{"-m", writeChat(t, plainTemplate), "-n", "8", "-exact", "-sys", "A story."}
	play := func(lines ...string) (s *session, answers []string, errs string) {
		t.Helper()
		s, out, e := newSession(t, strings.Join(lines, "\n"), flags...)
		if err := s.run(t.Context()); err != nil {
			t.Fatal(err)
		}
		answers = strings.Split(out.String(), "\n")
		return s, answers[:len(answers)-1], e.String()
	}
	_, plain, _ := play("A king.", "A girl.")
	_, other, _ := play("A king.", "A dog.")
	if len(plain) != 2 || plain[1] == other[1] {
		t.Fatalf("%q, %q", plain, other)
	}
	for _, c := range []struct {
		name     string
		lines    []string
		messages []string
		said     []string
	}{
		{"undo", []string{"A king.", "A girl.", "/undo", "A dog."}, []string{"A story.", "A king.", plain[0], "A dog.", other[1]}, []string{`dropped "A girl."`}},
		{"undo all", []string{"A king.", "A girl.", "/undo", "/undo", "/undo"}, []string{"A story."}, []string{"there is no message to drop"}},
		{"clear", []string{"A dog.", "/clear", "A king."}, []string{"A story.", "A king.", plain[0]}, []string{"begins anew"}},
		{"forks", []string{"A king.", "/fork", "A girl.", "/back", "A dog.", "/back"}, []string{"A story.", "A king.", plain[0], "A dog.", other[1]}, []string{"fork 1, after 1 messages", "back at fork 1", "there is no fork"}},
		{"a fork in between", []string{"A king.", "A girl.", "/fork", "/undo", "A dog.", "/back"}, []string{"A story.", "A king.", plain[0], "A girl.", plain[1]}, nil},
		{"quit", []string{"A king.", " /quit", "/quit ", "A girl."}, nil, nil},
		{"help", []string{"/help", "/help x", "/udo", "/cl", "/something", "/"}, []string{"A story."}, []string{"/undo   drops", `no command "/help x": did you mean /help?`, "did you mean /undo?", "did you mean /clear?", "the commands are /undo, /regen, /tool, /clear"}},
		{"a slash", []string{"//undo", "/undo"}, []string{"A story."}, []string{`dropped "/undo"`}},
		{"two lines", []string{"one\\", "two", "/undo"}, []string{"A story."}, []string{`dropped "one\ntwo"`}},
		{"an end in the middle", []string{"one\\"}, nil, nil},
	} {
		s, _, errs := play(c.lines...)
		if got := s.contents(); c.messages != nil && !slices.Equal(got, c.messages) {
			t.Errorf("%s: %q, want %q", c.name, got, c.messages)
		}
		for _, said := range c.said {
			if !strings.Contains(errs, said) {
				t.Errorf("%s: %s, want %s", c.name, errs, said)
			}
		}
		switch c.name {
		case "quit":
			if len(s.turns) != 2 || s.messages[3].Content != " /quit" {
				t.Errorf("%s: %q", c.name, s.contents())
			}
		case "an end in the middle":
			if len(s.turns) != 1 || s.messages[1].Content != "one" {
				t.Errorf("%s: %q", c.name, s.contents())
			}
		}
	}
}

// TestChatTooLong: a conversation that does not fit says both numbers and the way out, and goes on after /undo.
func TestChatTooLong(t *testing.T) {
	long := strings.Repeat("a king and ", 12)
	s, out, errs := newSession(t, "A king.\nA girl.\n"+long+"\n/undo\nA dog.\n", "-m", writeChat(t, plainTemplate), "-c", "24", "-exact")
	err := s.run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "2 of 4 messages had no answer") {
		t.Errorf("%v", err)
	}
	for _, want := range []string{
		"the answer ends early: the context has 24 tokens, 4 of them", "tokens, and the context has 24; /undo drops", "larger, and -context-shift drops", `dropped "A king."`,
	} {
		if !strings.Contains(errs.String(), want) {
			t.Errorf("%s, want %s", errs, want)
		}
	}
	if got := s.contents(); len(got) != 2 || got[0] != "A dog." || !strings.HasSuffix(out.String(), "\n"+got[1]+"\n") {
		t.Errorf("%q, %q", out, got)
	}
	s.live, s.std.in = true, strings.NewReader(long)
	if err := s.run(t.Context()); err != nil || !strings.HasSuffix(errs.String(), "-keep drops old tokens\n") {
		t.Errorf("on a terminal: %v, %s", err, errs)
	}
}

// TestChatShift: with -keep and -context-shift a conversation goes on when it is longer than the context.
func TestChatShift(t *testing.T) {
	long := strings.Repeat("a king and ", 12)
	s, _, errs := newSession(t, "A king.\n"+long+"\n", "-m", writeChat(t, plainTemplate), "-c", "24", "-exact", "-n", "40", "-keep", "2", "-context-shift")
	if err := s.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(s.turns) != 2 || strings.Count(errs.String(), "tokens of the conversation were dropped for this answer: the context has 24") != 2 {
		t.Errorf("%q, %s", s.contents(), errs)
	}
	for _, i := range []int{1, 3} {
		if ids := encode(t, s.model, s.messages[i].Content); len(ids) < 30 {
			t.Errorf("%q has %d tokens", s.messages[i].Content, len(ids))
		}
	}
}

// encode returns the tokens of a text.
func encode(t testing.TB, model *opened, text string) []int {
	t.Helper()
	ids, err := model.Tokenizer().Encode(text, tokenizer.Options{Bare: true})
	if err != nil {
		t.Fatal(err)
	}
	return ids
}

// TestChatRefused: a template that rejects a message is told, and the conversation goes on.
func TestChatRefused(t *testing.T) {
	dir := writeChat(t, "{% for m in messages %}{% if m['content'] == 'bad' %}{{ raise_exception('no such words') }}{% endif %}{{ m['content'] }} {% endfor %}")
	s, out, errs := newSession(t, "bad\nA king.\n", "-m", dir, "-n", "3")
	if err := s.run(t.Context()); err == nil || !strings.Contains(errs.String(), "the message was dropped: chat template") || !strings.Contains(errs.String(), "no such words") {
		t.Errorf("%v, %s", err, errs)
	}
	if len(s.turns) != 1 || strings.Count(out.String(), "\n") != 1 {
		t.Errorf("%q, %q", out, s.contents())
	}
}

// TestChatTools: the template has the tools, their keys in the file's order.
func TestChatTools(t *testing.T) {
	template := "{% for t in tools %}{{ t | tojson }} {% endfor %}" + plainTemplate
	dir, plain := writeChat(t, template), writeChat(t, plainTemplate)
	write := func(text string) string {
		name := filepath.Join(t.TempDir(), "tools.json")
		if err := os.WriteFile(name, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
		return name
	}
	const tool = `{"type": "function", "function": {"name": "king", "b": 1, "a": [2]}}`
	s, _, _ := newSession(t, "", "-m", dir, "-tools", write("["+tool+"]"), "-n", "3")
	s.std.in = strings.NewReader("A king.\n")
	if err := s.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.undo()
	s.messages = append(s.messages, s.messages[:1]...)
	ids, err := s.prompt()
	if text := s.model.Tokenizer().Decode(ids); err != nil || !strings.HasPrefix(text, tool+" ") {
		t.Errorf("%q, %v", text, err)
	}
	for want, args := range map[string][]string{
		"no JSON list of tools": {dir, write(`{"a": 1}`)},
		"list of tools: inv":    {dir, write(`[{}] x`)},
		"tool 2 is no JSON obj": {dir, write(`[{}, "x"]`)},
		"the list is empty":     {dir, write(`[]`)},
		"no such file":          {dir, filepath.Join(dir, "none")},
		"has no place for tool": {plain, write("[" + tool + "]")},
	} {
		if status, _, err := leanlm(t, "x\n", "chat", "-m", args[0], "-tools", args[1]); status != exitError || !strings.Contains(err, "-tools") || !strings.Contains(err, want) {
			t.Errorf("%d, %s, want %s", status, err, want)
		}
	}
	if status, _, err := leanlm(t, "x\n", "chat", "-m", dir, "-tools", "-"); status != exitUsage || !strings.Contains(err, "-tools - is standard input") {
		t.Errorf("%d, %s", status, err)
	}
}

// interrupting sends this process an interrupt at the third write of each answer.
type interrupting struct {
	bytes.Buffer
	t                   *testing.T
	session             *session
	writes, interrupted int
}

func (w *interrupting) Write(p []byte) (int, error) {
	if w.session.asked > w.interrupted {
		if w.writes++; w.writes == 3 {
			w.writes, w.interrupted = 0, w.session.asked
			self, err := os.FindProcess(os.Getpid())
			if err == nil {
				err = self.Signal(os.Interrupt)
			}
			if err != nil {
				w.t.Error(err)
			}
		}
	}
	return w.Buffer.Write(p)
}

// TestChatInterrupt: an interrupt ends the answer. On a terminal the conversation goes on. The answers could be so long that they
// still grow when the signal arrives, however busy the machine is.
func TestChatInterrupt(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("a process cannot interrupt itself")
	}
	dir := writeChat(t, plainTemplate)
	for live, answers := range map[bool]int{true: 2, false: 1} {
		s, _, _ := newSession(t, "A king.\nA girl.\n", "-m", dir, "-n", "900", "-exact")
		out := &interrupting{t: t, session: s}
		s.std.out, s.live = out, live
		err := s.run(t.Context())
		written, messages := "", s.contents()
		for i := 1; i < len(messages); i += 2 {
			if n := len(messages[i]); n == 0 || n > 3000 { // an answer of 900 tokens has some 3800
				t.Errorf("terminal %v: answer %q", live, messages[i])
			}
			written += messages[i] + "\n"
		}
		if len(messages) != 2*answers || (err == context.Canceled) == live || out.String() != written {
			t.Errorf("terminal %v: %v, %q, and written is %q", live, err, messages, out)
		}
	}
}

// TestChatInterruptInput: an interrupt while no answer is written ends the conversation.
func TestChatInterruptInput(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("a process cannot interrupt itself")
	}
	s, _, _ := newSession(t, "", "-m", writeChat(t, plainTemplate), "-n", "2")
	in, writer := io.Pipe()
	defer writer.Close()
	s.std.in, s.std.err, s.live = in, &interrupting{t: t, session: s, writes: 2, interrupted: -1}, true // the prompt is the third write
	if err := s.run(t.Context()); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}
