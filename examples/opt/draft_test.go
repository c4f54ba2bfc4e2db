package main

import (
	"encoding/json"
	"strings"
	"testing"
)

// Texts with guesses are those without, one by one and together, and wherever they end.
func TestDraft(t *testing.T) {
	again := "Viktor has a cat. The cat of Viktor is called Smoky. Viktor has a dog. The dog of Viktor is called"
	for _, args := range [][]string{
		{"-prompt", again, "-n", "60"},
		{"-prompt", again, "-n", "1"},
		{"-prompt", again, "-n", "33", "-prompt", "Once", "-prompt", "The cat of Viktor is"},
		{"-prompt", again, "-n", "60", "-stop", "name"},
		{"-prompt", again, "-n", "100000"},
		{"-prompt", again, "-n", "40", "-cache", "f16", "-attn", "head"},
	} {
		var texts [2]string
		var reports [2]reportJSON
		for i, more := range [][]string{nil, {"-draft", "ngram", "-draft-tokens", "5"}} {
			var out, log string
			var status int
			if status, texts[i], log = command(t, append(args, more...)...); status != 0 {
				t.Fatalf("%v: %s", args, log)
			}
			if status, out, log = command(t, append(append(args, "-json"), more...)...); status != 0 {
				t.Fatalf("%v: %s", args, log)
			}
			if err := json.Unmarshal([]byte(out), &reports[i]); err != nil {
				t.Fatal(err)
			}
		}
		if texts[0] != texts[1] {
			t.Errorf("%v:\n%s\nand with guesses:\n%s", args, texts[0], texts[1])
		}
		for i, x := range reports[0].Texts {
			if y := reports[1].Texts[i]; x.Text != y.Text || x.Reason != y.Reason || len(x.Tokens) != len(y.Tokens) {
				t.Errorf("%v: %+v, and with guesses %+v", args, x, y)
			}
		}
		a, b := reports[0].Stats, reports[1].Stats
		if a.Drafted != 0 || b.Accepted > b.Drafted || b.Decode.Tokens < a.Decode.Tokens || args[3] == "60" && (b.Accepted < 10 || b.Decode.Runs >= a.Decode.Runs) {
			t.Errorf("%v: %+v, and with guesses %+v", args, a, b)
		}
	}
}

func TestDraftFlags(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"-draft small", `"small" is none of ngram`},
		{"-draft-tokens 3", "needs -draft"},
		{"-draft ngram -draft-tokens 0", "0 is outside [1, 64]"},
		{"-draft ngram -draft-tokens 65", "65 is outside"},
		{"-draft ngram -temperature 0.5", "-temperature 0.5"},
		{"-draft ngram -top-k 4", "-temperature 1"},
		{"-draft ngram -attn fused", "-attn lean"},
		{"-draft ngram -json -logprobs 2", "-logprobs"},
	} {
		status, _, log := command(t, append([]string{"-prompt", "a"}, strings.Fields(c.args)...)...)
		if status != 2 || !strings.Contains(log, c.want) {
			t.Errorf("%s: status %d, %s; want 2 and %q", c.args, status, log, c.want)
		}
	}
	if status, _, log := command(t, "-i", "-draft", "ngram"); status != 2 || !strings.Contains(log, "-draft has no meaning for -i") {
		t.Errorf("-i: status %d, %s", status, log)
	}
}
