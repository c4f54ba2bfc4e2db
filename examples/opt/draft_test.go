package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/reftest"
)

// What followed the last tokens before is the draft, from the longest match and the latest
// place; it goes round where it reaches the end.
func TestLookup(t *testing.T) {
	for _, c := range []struct {
		text []int
		most int
		want []int
	}{
		{nil, 4, nil},
		{[]int{1}, 4, nil},
		{[]int{1, 1}, 4, nil},
		{[]int{1, 2, 3, 4}, 4, nil},
		{[]int{7, 1, 7}, 4, nil},                     // one token is too little
		{[]int{1, 2, 3, 4, 5, 1, 2}, 2, []int{3, 4}}, // behind a match
		{[]int{1, 2, 3, 4, 5, 1, 2}, 9, []int{3, 4, 5, 1, 2, 3, 4, 5, 1}},    // and round
		{[]int{5, 5, 5}, 4, []int{5, 5, 5, 5}},                               // a match that overlaps
		{[]int{0, 1, 2, 3, 9, 1, 2, 4, 1, 2}, 1, []int{4}},                   // the latest of two places
		{[]int{0, 1, 2, 3, 9, 9, 1, 2, 4, 0, 1, 2}, 1, []int{3}},             // the longer of two matches
		{[]int{6, 7, 8, 6, 7, 8, 6, 7}, 5, []int{8, 6, 7, 8, 6}},             // a text that repeats
		{[]int{3, 3, 1, 2, 0, 0, 1, 2, 3, 3}, 3, []int{1, 2, 0}},             // at the very beginning
		{[]int{1, 2, 3, 4, 5, 6, 1, 2, 3, 9, 9, 1, 2, 3}, 3, []int{9, 9, 1}}, // of three tokens
	} {
		l := lookup{text: c.text}
		if got := l.next(c.most); !slices.Equal(got, c.want) {
			t.Errorf("%v, %d: %v, want %v", c.text, c.most, got, c.want)
		}
	}
}

// With drafts the tokens, their probabilities and why texts end are the same, greedy and
// drawn, of one text and of several.
func TestDraft(t *testing.T) {
	dir := writeModel(t, func(c map[string]any) { c["max_position_embeddings"] = 200 })
	testDraft(t, reftest.Cases(t, 20, 80), "-model", dir)
	accepted := 0
	for _, flags := range [][]string{{"-attn", "default"}, {"-linear", "stock"}, {"-logprobs", "2"}, {"-stop", "q"}, {"-n", "500"}, {"-n", "1"}, {"-n", "2"}, {"-chunk", "3"}} {
		accepted += testDraft(t, reftest.Cases(t, 10, 20), slices.Concat([]string{"-model", dir}, flags)...)
	}
	if accepted == 0 {
		t.Error("nothing was accepted")
	}
}

// On a GPU, too, where the rows of a step are recorded.
func TestGPUDraft(t *testing.T) {
	devicetest.Open(t)
	n := 60
	if testing.Short() {
		n = 5
	}
	testDraft(t, n, "-device", "gpu")
	if !testing.Short() {
		testDraft(t, n, "-device", "gpu", "-logprobs", "2")
	}
}

// On two GPUs, which -stats tells of.
func TestGPUsDraft(t *testing.T) {
	devicetest.OpenSome(t, 2)
	for _, drawn := range [][]string{nil, {"-temperature", "1", "-top-p", "0.95", "-seed", "5"}} {
		args := append([]string{"-prompt", "The key of Mira", "-n", "3", "-chunk", "8", "-stats"}, drawn...)
		_, want, _ := command(t, args...)
		status, out, log := command(t, append(args, "-device", "gpu:0,1")...)
		if status != 0 || out != want {
			t.Errorf("%v: status %d, %q, on the CPU %q: %s", drawn, status, out, want, log)
		}
		for _, line := range []string{"MB of GPU 0 used here", "MB of GPU 1 used here", " with GPU 1 ", "exchange 10 sums of 1.0 KB a run of decode, which take "} {
			if !strings.Contains(log, line) {
				t.Errorf("%q is not in %s", line, log)
			}
		}
	}
	if !testing.Short() {
		testDraft(t, 60, "-device", "gpu:1,0")
	}
}

// testDraft compares texts with drafts and without, and returns how many guesses were
// accepted.
func testDraft(t *testing.T, n int, flags ...string) (accepted int) {
	t.Helper()
	repeated := strings.Repeat("The key of Mira is in the box. ", 3)
	if strings.Contains(strings.Join(flags, " "), "-model") {
		repeated = "abcabcabc"
	}
	for _, prompts := range [][]string{{repeated}, {"Once", repeated, "a"}} {
		for _, drawn := range [][]string{nil, {"-temperature", "0.4", "-seed", "5"}} {
			args := slices.Concat([]string{"-n", fmt.Sprint(n)}, flags, drawn)
			for _, p := range prompts {
				args = append(args, "-prompt", p)
			}
			want := jsonOf(t, args...)
			for _, guesses := range []int{1, 3, 8, 40} {
				if testing.Short() && guesses > 3 {
					break
				}
				got := jsonOf(t, slices.Concat(args, []string{"-draft", "ngram", "-draft-tokens", fmt.Sprint(guesses)})...)
				for i, x := range got.Texts {
					w := want.Texts[i]
					if !slices.Equal(x.Tokens, w.Tokens) || x.Text != w.Text || x.Reason != w.Reason || len(x.Logprobs) != len(w.Logprobs) {
						t.Errorf("%v, %d guesses, text %d: %v (%s), want %v (%s)", args, guesses, i, x.Tokens, x.Reason, w.Tokens, w.Reason)
						continue
					}
					for j, p := range x.Logprobs {
						if diff := p.Logprob - w.Logprobs[j].Logprob; diff > 1e-4 || diff < -1e-4 || p.Token != w.Tokens[j] {
							t.Errorf("%v, %d guesses, text %d, token %d: %+v, want %+v", args, guesses, i, j, p, w.Logprobs[j])
						}
					}
				}
				s := got.Stats
				if s.Draft == nil || s.Draft.Accepted > s.Draft.Tokens || s.Decode.Tokens != want.Stats.Decode.Tokens || s.Decode.Runs > want.Stats.Decode.Runs {
					t.Errorf("%v, %d guesses: %+v, %+v; without %+v", args, guesses, s.Draft, s.Decode, want.Stats.Decode)
				}
				accepted += s.Draft.Accepted
			}
			if want.Stats.Draft != nil {
				t.Errorf("%v: drafts: %+v", args, want.Stats.Draft)
			}
		}
	}
	return accepted
}

// A repetitive text takes far fewer runs, and -stats tells.
func TestDraftStats(t *testing.T) {
	args := []string{"-prompt", strings.Repeat("The key of Mira is in the green box. ", 20), "-n", "200", "-stats"}
	_, want, _ := command(t, args...)
	status, got, log := command(t, append(args, "-draft", "ngram")...)
	if status != 0 || got != want {
		t.Errorf("status %d, %q, want %q", status, got, want)
	}
	var accepted, guessed, with, runs int
	var each float64
	for line := range strings.Lines(log) {
		fmt.Sscanf(line, "drafts %d of %d guessed tokens accepted, in %d of %d runs; %f tokens a run", &accepted, &guessed, &with, &runs, &each)
	}
	if accepted < 100 || guessed < accepted || with > runs || runs > 199-accepted || each < 2 {
		t.Errorf("%s", log)
	}
}

// The text of any length and any end is the same in a session whose drafts come from all of
// its lines.
func TestDraftSession(t *testing.T) {
	dir := writeModel(t, func(c map[string]any) { c["max_position_embeddings"] = 400 })
	rng := rand.New(rand.NewPCG(3, 4))
	plain, drafts := newConversation(t, false, "-model", dir, "-n", "30", "-stop", "ab"), newConversation(t, false, "-model", dir, "-n", "30", "-stop", "ab", "-draft", "ngram")
	for range 9 {
		line := []string{"abcabcabc", "x", "", "/fork", "/back", "/undo"}[rng.IntN(6)]
		want, got := plain.text(line), drafts.text(line)
		if got != want || !slices.Equal(plain.context, drafts.context) {
			t.Fatalf("%q: %q, without drafts %q", line, got, want)
		}
		checkDecoder(t, drafts)
	}
	if s := drafts.l.decoder.Stats(); s.Draft.Accepted == 0 {
		t.Errorf("%+v", s)
	}
}
