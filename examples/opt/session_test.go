package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/examples/opt/model"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/reftest"
)

// conversation is a session that reads lines from a list.
type conversation struct {
	*session
	t   *testing.T
	out bytes.Buffer
}

func newConversation(t *testing.T, ahead bool, args ...string) *conversation {
	t.Helper()
	o, err := parse(append([]string{"-i", "-stats"}, args...), io.Discard)
	if err == nil {
		err = o.readPrompts(nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	o.ahead = ahead
	l, err := load(o, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	s, err := newSession(l, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	x := &conversation{session: s, t: t}
	s.out = &x.out
	return x
}

// play reads lines and returns what was written.
func (x *conversation) play(lines ...string) string {
	x.t.Helper()
	x.out.Reset()
	err := x.run(context.Background(), func() (string, error) {
		if len(lines) == 0 {
			return "", io.EOF
		}
		line := lines[0]
		lines = lines[1:]
		return line, nil
	}, func(func()) func() { return func() {} })
	x.l.options.prompts = nil // were played
	if err != nil {
		x.t.Fatal(err)
	}
	return strings.TrimSuffix(x.out.String(), "\n") // of the end
}

// text is what was written but for the session's own lines.
func (x *conversation) text(lines ...string) string {
	text, _, _ := strings.Cut(x.play(lines...), "\nopt: ")
	return text
}

// Whatever was done before, a line goes on from the context that stands on the screen:
// as from nothing with the same tokens.
func TestSessionLaws(t *testing.T) {
	dir := writeModel(t, func(c map[string]any) { c["max_position_embeddings"] = 2000 }) // pages for some forks
	for _, ahead := range []bool{false, true} {
		for seed := range uint64(reftest.Cases(t, 3, 6)) {
			rng := rand.New(rand.NewPCG(seed, 1))
			x := newConversation(t, ahead, "-model", dir, "-n", "6", "-stop", "ab", "-stop", "o", "-stop", "es")
			var shown []string // the texts that can be returned to by /undo, the last one first
			type place struct{ shown []string }
			var forks []place
			screen := ""
			for range 30 {
				switch rng.IntN(6) {
				case 0:
					if len(shown) > 0 {
						screen, shown = shown[0], shown[1:]
					}
					x.play("/undo")
				case 1:
					x.play("/fork")
					forks = append(forks, place{slices.Insert(slices.Clone(shown), 0, screen)})
				case 2:
					if n := len(forks); n > 0 {
						screen, shown = forks[n-1].shown[0], slices.Clone(forks[n-1].shown[1:])
						forks = forks[:n-1]
					}
					x.play("/back")
				default:
					line := string([]byte("abcdefgh")[:rng.IntN(4)])
					text := x.text(line)
					shown = slices.Insert(shown, 0, screen)
					screen += line + text
				}
				if got := x.l.tokenizer.Decode(x.context); got != screen {
					t.Fatalf("seed %d: the context is %q, and the screen has %q", seed, got, screen)
				}
				if d := x.l.decoder; d.Len(0) > len(x.context) {
					t.Fatalf("seed %d: the decoder has %d tokens of %d", seed, d.Len(0), len(x.context))
				}
				checkDecoder(t, x)
			}
		}
	}
}

// checkDecoder compares what the decoder would say next with a decoder that reads the
// context at once.
func checkDecoder(t *testing.T, x *conversation) {
	t.Helper()
	d, most := x.l.decoder, x.l.config.MaxPositions
	n := d.Len(0)
	if n == 0 || n == most {
		return
	}
	fresh, err := x.l.weights.NewDecoder(model.Options{Capacity: []int{n + 1}})
	if err != nil {
		t.Fatal(err)
	}
	defer fresh.Close()
	f, err := d.Fork(0)
	if err != nil {
		t.Fatal(err)
	}
	const probe = 4 + 'q'
	err = errors.Join(
		fresh.Prefill(context.Background(), [][]int{append(slices.Clone(x.context[:n]), probe)}, nil),
		d.Step([]int{probe}))
	if err != nil {
		t.Fatal(err)
	}
	got, want := d.Logits(0), fresh.Logits(0)
	for i := range want {
		if diff := got[i] - want[i]; diff > 1e-4 || diff < -1e-4 {
			t.Fatalf("logit %d behind %d tokens is %v, want %v", i, n, got[i], want[i])
		}
	}
	if err := d.Return(0, f); err != nil {
		t.Fatal(err)
	}
}

// Lines are the texts that they say, and -prompt is the first of them.
func TestSessionLines(t *testing.T) {
	dir := writeModel(t, nil)
	plain := func(prompt string) string {
		_, out, _ := command(t, "-model", dir, "-n", "5", "-prompt", prompt)
		return strings.TrimSuffix(out, "\n")
	}
	for line, text := range map[string]string{
		"abc": "abc", `a\nb`: "a\nb", `a\\nb`: `a\nb`, `\x\`: `\x\`, "//quit": "/quit", "//": "/", " a ": " a ", "a/b": "a/b",
	} {
		x := newConversation(t, false, "-model", dir, "-n", "5")
		if got, want := x.text(line), plain(text); got != want {
			t.Errorf("%q: %q, want %q", line, got, want)
		}
	}
	x := newConversation(t, false, "-model", dir, "-n", "5", "-prompt", "abc")
	if got, want := x.text(), "abc"+plain("abc"); got != want {
		t.Errorf("-prompt: %q, want %q", got, want)
	}
	// Nothing is continued as the command continues it.
	x = newConversation(t, false, "-model", dir, "-n", "5")
	if got, want := x.text(""), plain(""); got != want {
		t.Errorf("nothing: %q, want %q", got, want)
	}
	// The end of a text is told, and the session goes on.
	end := plain("abc")[3]
	eos := writeModel(t, func(c map[string]any) { c["eos_token_id"] = 4 + int(end) })
	x = newConversation(t, false, "-model", eos, "-n", "5")
	if got := x.play("abc", "x"); !strings.Contains(got, "\nopt: the model ended the text\nopt: read 4 tokens, added ") || !strings.Contains(got, "opt: read 1 token, added ") {
		t.Errorf("the end of a text: %q", got)
	}
}

// Too many forks are an error line, and nothing is lost by it.
func TestSessionForksFull(t *testing.T) {
	dir := writeModel(t, func(c map[string]any) { c["max_position_embeddings"] = 140 })
	x := newConversation(t, false, "-model", dir, "-n", "100")
	x.play("abc")
	full := false
	for i := range 10 {
		before := slices.Clone(x.context)
		x.play("/fork", "/undo")
		out := x.play(fmt.Sprint("abc", i))
		if strings.Contains(out, "cache is full") {
			full = true
			if len(x.context) != 0 && !slices.Equal(x.context, before) {
				t.Errorf("the context has %d tokens", len(x.context))
			}
			break
		}
	}
	if !full {
		t.Error("forks of 10 texts have room in pages for two")
	}
	if out := x.play("/back", "/back", "/undo", "abc"); strings.Contains(out, "full") || !strings.Contains(out, "opt: read ") {
		t.Errorf("afterwards: %q", out)
	}
}

// On a GPU a session writes what it writes on the CPU.
func TestGPUSession(t *testing.T) {
	devicetest.Open(t)
	lines := []string{"Once", "", "/fork", " The", "/back", " The", "/undo", " A"}
	want := newConversation(t, false, "-n", "3").play(lines...)
	if got := newConversation(t, false, "-n", "3", "-device", "gpu").play(lines...); got != want {
		t.Errorf("%q, on the CPU %q", got, want)
	}
}

// On a GPU texts, and the probabilities of their tokens, are those of the CPU, whether
// tokens are chosen there or here.
func TestGPUTexts(t *testing.T) {
	devicetest.Open(t)
	for _, flags := range [][]string{nil, {"-logprobs", "2"}, {"-stop", "e"}, {"-temperature", "0.7", "-seed", "3"}, {"-temperature", "0.7", "-seed", "3", "-logprobs", "1"}} {
		args := append([]string{"-prompt", "Once upon", "-n", "4"}, flags...)
		want, got := jsonOf(t, args...).Texts[0], jsonOf(t, append(args, "-device", "gpu")...).Texts[0]
		if got.Text != want.Text || !slices.Equal(got.Tokens, want.Tokens) || got.Reason != want.Reason || len(got.Logprobs) != len(want.Logprobs) {
			t.Errorf("%v: %+v, on the CPU %+v", flags, got, want)
			continue
		}
		for i, p := range got.Logprobs {
			if diff := p.Logprob - want.Logprobs[i].Logprob; diff > 1e-4 || diff < -1e-4 || p.Top[0].Token != want.Logprobs[i].Top[0].Token {
				t.Errorf("%v: token %d: %+v, on the CPU %+v", flags, i, p, want.Logprobs[i])
			}
		}
	}
}
