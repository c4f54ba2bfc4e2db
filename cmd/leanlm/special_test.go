package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestSpecial: with -special a text has the names of special tokens and the token that ends the text, -stop is found in that text, and
// the tokens are the same.
func TestSpecial(t *testing.T) {
	const name = "<|im_end|>" // of token 17
	dir := writeNamed(t)
	args := []string{"-m", dir, "-p", "Once upon a time", "-n", "16", "-logprobs", "2"}
	plain, _ := generated(t, args...)
	named, _ := generated(t, append(args, "-sp")...)
	x, y := plain.Texts[0], named.Texts[0]
	if strings.Contains(x.Text, name) || strings.Count(y.Text, name) != 1 || strings.Replace(y.Text, name, "", 1) != x.Text || y.Reason != "length" {
		t.Fatalf("%q, with names %q", x.Text, y.Text)
	}
	if x.Tokens[10] != 17 || y.Tokens[10] != 17 || x.LogProbs[10].Text != "" || y.LogProbs[10].Text != name || x.LogProbs[10].Top[0].Text != "" || y.LogProbs[10].Top[0].Text != name {
		t.Errorf("%+v, with names %+v", x.LogProbs[10], y.LogProbs[10])
	}
	before, after, _ := strings.Cut(y.Text, name)
	for _, c := range []struct{ stop, text string }{
		{name, before},
		{"im_end", before + "<|"},
		{before[len(before)-2:] + name[:3], before[:len(before)-2]},
		{name + after[:2], before},
		{before[len(before)-4:] + after[:4], y.Text}, // the name is between
		{"</s>", y.Text},
	} {
		d, _ := generated(t, append(args, "-special", "-stop", c.stop)...)
		if got := d.Texts[0]; got.Text != c.text || (got.Reason == "stop") != (c.text != y.Text) {
			t.Errorf("-stop %q: %q, %s, want %q", c.stop, got.Text, got.Reason, c.text)
		}
	}

	if err := os.WriteFile(filepath.Join(dir, "generation_config.json"), []byte(`{"eos_token_id": 17}`), 0o666); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		flag, stop, text, reason string
	}{
		{"-special=false", "never", before, "end"},
		{"-special", "never", before + name, "end"},
		{"-special", name, before, "stop"},
		{"-special", name + "a", before + name, "end"},
	} {
		d, _ := generated(t, append(args, c.flag, "-stop", c.stop)...)
		if got := d.Texts[0]; got.Text != c.text || got.Reason != c.reason || len(got.Tokens) != 11 {
			t.Errorf("%s -stop %q: %q, %s, want %q, %s", c.flag, c.stop, got.Text, got.Reason, c.text, c.reason)
		}
	}
	_, out, _ := leanlm(t, "", append([]string{"generate", "-exact", "-special"}, args[:6]...)...)
	if out != before+name+"\n" {
		t.Errorf("without -json: %q", out)
	}
}

// TestChatSpecial: with -special an answer is written with its special tokens. Messages have no names, as without -special.
func TestChatSpecial(t *testing.T) {
	const name = "<|im_end|>"
	dir := writeNamed(t)
	if err := os.WriteFile(filepath.Join(dir, "chat_template.jinja"), []byte("{% for m in messages %}{{ m['content'] }}{% endfor %}"), 0o666); err != nil {
		t.Fatal(err)
	}
	in := "Once upon a time\n Once upon a time\n"
	for _, ends := range []bool{false, true} {
		if ends {
			if err := os.WriteFile(filepath.Join(dir, "generation_config.json"), []byte(`{"eos_token_id": 17}`), 0o666); err != nil {
				t.Fatal(err)
			}
		}
		for _, stop := range []string{"never", "<|"} {
			args := []string{"-m", dir, "-n", "16", "-exact", "-stop", stop}
			plain, _, _ := newSession(t, in, args...)
			named, out, _ := newSession(t, in, append(args, "-special")...)
			for _, s := range []*session{plain, named} {
				if err := s.run(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			first, _, _ := strings.Cut(out.String(), "\n")
			all, stopped := plain.messages[1].Content, named.messages[1].Content
			switch {
			case stop != "never":
				// Without -special this stop text is not found.
				if first != stopped || stopped == "" || !strings.HasPrefix(all, stopped) || ends != (all == stopped) {
					t.Errorf("ends %v: %q, wrote %q, want the beginning of %q", ends, stopped, first, all)
				}
			case strings.Join(plain.contents(), "|") != strings.Join(named.contents(), "|") || len(plain.messages) != 4:
				t.Errorf("ends %v: %q, with names %q", ends, plain.contents(), named.contents())
			case strings.Replace(first, name, "", 1) != all || !strings.Contains(first, name) || ends != strings.HasSuffix(first, name):
				t.Errorf("ends %v: %q, the message is %q", ends, first, all)
			}
		}
	}
}

// TestMessageText: the message of an answer that was written with names of special tokens and cut before a stop text.
func TestMessageText(t *testing.T) {
	s, _, _ := newSession(t, "", "-m", writeChat(t, plainTemplate), "-n", "1")
	tokens := s.model.Tokenizer()
	a, b := encode(t, s.model, "Once"), encode(t, s.model, " upon")
	ids := append(append(append([]int{2}, a...), 2), b...)
	const all = "</s>Once</s> upon"
	for n, want := range map[int]string{0: "", 1: "", 4: "", 5: "O", 8: "Once", 9: "Once", 12: "Once", 13: "Once ", len(all): "Once upon"} {
		if got := messageText(tokens, ids, all[:n], true); got != want {
			t.Errorf("%q: %q, want %q", all[:n], got, want)
		}
	}
	if got := messageText(tokens, ids, "", false); got != "Once upon" {
		t.Errorf("%q", got)
	}
}
