package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"gorgonia.org/leanattention/decoder"
)

// TestFlagTexts: every flag has a text in the help, and otherNames name flags that exist.
func TestFlagTexts(t *testing.T) {
	own := map[string]bool{}
	for _, c := range commands {
		_, help, _ := leanlm(t, "", c.name, "-h")
		for _, entry := range strings.Split(help, "\n  -")[1:] {
			head, text, _ := strings.Cut(entry, "\n")
			if len(strings.TrimSpace(text)) < 4 || strings.Contains(text, "(default )") {
				t.Errorf("%s: %q", c.name, entry)
			}
			for i, name := range strings.Split(head, ", -") {
				name, value, _ := strings.Cut(name, " ")
				own[name] = true
				if i == 0 && strings.Contains(text, "`") {
					t.Errorf("%s -%s %s: %q", c.name, name, value, text)
				}
			}
		}
	}
	if !own["prompt"] || !own["threads"] || len(own) < 60 {
		t.Errorf("%d flags", len(own))
	}
	for other, name := range otherNames {
		if !own[name] && !slices.ContainsFunc(commands, func(c command) bool { return c.name == name }) || own[other] && other != name {
			t.Errorf("-%s for -%s", other, name)
		}
	}
}

// TestNearFlags: a wrong flag names those that may have been meant, and a wrong value suggests nothing.
func TestNearFlags(t *testing.T) {
	for wrong, want := range map[string]string{
		"-temprature": "did you mean -temp?", "-temperatur": "did you mean", "-top_k": "did you mean -top-k?", "-topk": "did you mean -top-k?", "-Model": "did you mean -model?",
		"-models": "did you mean", "-max_new_tokens": "did you mean -max-new-tokens?", "-wieghts": "did you mean -weights?", "-promt": "did you mean -prompt?",
		"-sed": "did you mean -seed?", "-n-gpu-layers": "did you mean -device?", "-dtype": "did you mean -weights?", "--max-tokens": "did you mean -n?",
		"-nonsense": "not defined: -nonsense\n", "-zzzzzz": "not defined: -zzzzzz\n",
	} {
		if status, _, errs := leanlm(t, "", "generate", "-p", "a", wrong, "x"); status != exitUsage || !strings.Contains(errs, want) {
			t.Errorf("%s: status %d, %s, want %s", wrong, status, errs, want)
		}
	}
	if _, _, errs := leanlm(t, "", "generate", "-n", "x"); strings.Contains(errs, "did you mean") || !strings.Contains(errs, `"x"`) {
		t.Errorf("%s", errs)
	}
}

// TestFlagsRefused: flags without a meaning, or with a wrong value, are errors that name the flag.
func TestFlagsRefused(t *testing.T) {
	for _, c := range []struct {
		want string
		args []string
	}{
		{"- is given 2 times, and standard input can be read once", []string{"generate", "-f", "-", "-prompts", "-"}},
		{"- is given 2 times", []string{"generate", "-f", "-", "-f", "-"}},
		{`for flag -stop: it is empty`, []string{"generate", "-p", "a", "-stop", ""}},
		{`for flag -stop: it is not UTF-8`, []string{"generate", "-p", "a", "-stop", "\xff"}},
		{"-prompt-cache needs a file", []string{"generate", "-p", "a", "-prompt-cache", ""}},
		{"-tools needs a file", []string{"chat", "-tools", ""}},
		{"-prompt-cache is for one prompt, and there are 2", []string{"generate", "-p", "a", "-p", "b", "-prompt-cache", "x"}},
		{`"b" is no flag`, []string{"generate", "-p", "a", "b"}},
		{`"-" is no flag`, []string{"generate", "-p", "a", "-", "x"}},
		{`-device "gpu:1,0,1" has GPU 1 twice`, []string{"generate", "-p", "a", "-device", "gpu:1,0,1"}},
		{`-device "gpu:0,": "" is no number of a GPU`, []string{"generate", "-p", "a", "-device", "gpu:0,"}},
		{`-device "gpu:-1": "-1" is no number of a GPU`, []string{"generate", "-p", "a", "-device", "gpu:-1"}},
		{`for flag -shard: none of auto, context, heads`, []string{"generate", "-p", "a", "-device", "gpu:0,1", "-shard", "rows"}},
		{"-shard needs several GPUs", []string{"generate", "-p", "a", "-device", "gpu", "-shard", "context"}},
		{"for flag -ctk: none of bf16, e4m3, f16, f32, int8, q4", []string{"generate", "-p", "a", "-ctk", "f8"}},
		{"for flag -seed: not a whole number from 0 on", []string{"generate", "-p", "a", "-seed", "-1"}},
		{"not defined: -seed", []string{"perplexity", "-f", "x", "-seed", "3"}},
		{"not defined: -temp", []string{"perplexity", "-f", "x", "-temp", "1"}},
		{"not defined: -stop", []string{"perplexity", "-f", "x", "-stop", "a"}},
		{"not defined: -json", []string{"chat", "-json"}},
		{"not defined: -n-samples", []string{"chat", "-n-samples", "2"}},
	} {
		if status, out, errs := leanlm(t, "", c.args...); status != exitUsage || out != "" || !strings.HasPrefix(errs, "leanlm: ") || !strings.Contains(errs, c.want) {
			t.Errorf("%q: status %d, %q, %s, want %s", c.args, status, out, errs, c.want)
		}
	}
	for _, c := range []struct {
		want string
		args []string
	}{
		{"LogProbs is -1", []string{"-json", "-logprobs", "-1"}}, {"LogProbs is 100000, not in [0, 2048]", []string{"-json", "-logprobs", "100000"}},
		{"Temperature is NaN", []string{"-temp", "NaN"}}, {"TopP is 2, not in [0, 1]", []string{"-top-p", "2"}}, {"TopP is -0.1", []string{"-top-p", "-0.1"}},
		{"TopK is -1", []string{"-top-k", "-1"}}, {"Options.Workers is -1", []string{"-t", "-1"}}, {"Options.Workers is 5000000", []string{"-t", "5000000"}},
		{"Options.Draft is 1025", []string{"-draft", "1025"}}, {"Options.Chunk is -1", []string{"-ub", "-1"}},
	} {
		args := append([]string{"generate", "-p", "a", "-n", "1"}, c.args...)
		if status, out, errs := leanlm(t, "", args...); status != exitError || out != "" || !strings.Contains(errs, c.want) {
			t.Errorf("%q: status %d, %q, %s, want %s", args, status, out, errs, c.want)
		}
	}
	if status, _, errs := leanlm(t, "", "generate", "-p", "a", "-n", "2", "-t", "4096"); status != 0 {
		t.Errorf("many threads: status %d, %s", status, errs)
	}
}

// TestStandardInput: texts come from standard input as from flags.
func TestStandardInput(t *testing.T) {
	dir := writeModel(t, nil)
	text := func(in string, args ...string) string {
		t.Helper()
		status, out, errs := leanlm(t, in, append([]string{"generate", "-m", dir, "-n", "4"}, args...)...)
		if status != 0 {
			t.Errorf("%v: status %d, %s", args, status, errs)
		}
		return out
	}
	for _, c := range []struct {
		in         string
		args, same []string
	}{
		{"abc", []string{"-f", "-"}, []string{"-p", "abc"}},
		{"abc\n", []string{"-f", "-"}, []string{"-p", "abc"}},
		{"abc\r\n", []string{"-f", "-"}, []string{"-p", "abc"}},
		{"a\nb\n\n", []string{"-f", "-"}, []string{"-p", "a\nb\n"}},
		{"", []string{"-f", "-"}, []string{"-p", ""}},
		{"b\n\n c \r\nd", []string{"-p", "a", "-prompts", "-"}, []string{"-p", "a", "-p", "b", "-p", " c ", "-p", "d"}},
		{"b", []string{"-p", "a", "-f", "-"}, []string{"-p", "a", "-p", "b"}},
	} {
		if got, want := text(c.in, c.args...), text("", c.same...); got != want {
			t.Errorf("%v of %q: %q, want %q", c.args, c.in, got, want)
		}
	}
	if status, _, errs := leanlm(t, "\n\n", "generate", "-prompts", "-"); status != exitError || !strings.Contains(errs, "-prompts") {
		t.Errorf("no prompts: status %d, %s", status, errs)
	}
}

// endless is a standard input without end.
type endless struct{}

func (endless) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// TestInputBounds: input is bounded, here by a lower bound than outside of tests, and an error of the input is told.
func TestInputBounds(t *testing.T) {
	defer func(n int64) { maxText = n }(maxText)
	maxText = 1 << 20
	for _, args := range [][]string{{"generate", "-f", "-"}, {"generate", "-prompts", "-"}, {"perplexity", "-f", "-"}, {"tokenize", "-f", "-"}} {
		var errs bytes.Buffer
		if status := run(t.Context(), args, streams{endless{}, io.Discard, &errs}); status != exitError || !strings.Contains(errs.String(), "standard input has more than ") {
			t.Errorf("%v: status %d, %s", args, status, &errs)
		}
		errs.Reset()
		if status := run(t.Context(), args, streams{iotest.ErrReader(io.ErrClosedPipe), io.Discard, &errs}); status != exitError || !strings.Contains(errs.String(), io.ErrClosedPipe.Error()) {
			t.Errorf("%v: status %d, %s", args, status, &errs)
		}
	}
	if _, err := os.Stat("/dev/zero"); err == nil {
		if status, _, errs := leanlm(t, "", "generate", "-prompts", "/dev/zero"); status != exitError || !strings.Contains(errs, "/dev/zero has more than ") {
			t.Errorf("status %d, %s", status, errs)
		}
	}
	huge := filepath.Join(t.TempDir(), "prompts")
	if err := os.WriteFile(huge, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(huge, maxText+1); err != nil {
		t.Skip(err)
	}
	if status, _, errs := leanlm(t, "", "generate", "-prompts", huge); status != exitError || !strings.Contains(errs, "prompts has more than ") {
		t.Errorf("a file of %d bytes: status %d, %s", maxText+1, status, errs)
	}
}

// TestLongWord: a prompt that is one long word is found too long within seconds.
func TestLongWord(t *testing.T) {
	began := time.Now()
	status, _, errs := leanlm(t, "", "generate", "-p", strings.Repeat("a", 1<<21))
	if status != exitError || !strings.Contains(errs, "tokens, and Options.Context is 2048") || time.Since(began) > 30*time.Second {
		t.Errorf("status %d after %v: %s", status, time.Since(began), errs)
	}
}

// TestTemperatureOfTop: -top-k and -top-p ask for drawing, at temperature 1 unless another one is given.
func TestTemperatureOfTop(t *testing.T) {
	for _, c := range []struct {
		args string
		want float64
	}{
		{"-top-k 3", 1}, {"-top-p 0.5", 1}, {"-min-p 0.1", 1}, {"-typical 0.5", 1}, {"-top-k 3 -temp 2", 2}, {"-top-p 0.5 -temperature 0.5", 0.5}, {"", 0}, {"-seed 3", 0},
		{"-temp 0 -top-k 3", 0}, {"-repeat-penalty 1.1", 0},
	} {
		var g generation
		if err := g.flags().parse(strings.Fields(c.args), streams{nil, io.Discard, io.Discard}); err != nil {
			t.Fatal(err)
		}
		model, err := g.model.open()
		if err != nil {
			t.Fatal(err)
		}
		if got := g.sampling.of(model, streams{nil, io.Discard, io.Discard}).Temperature; got != c.want {
			t.Errorf("%s: temperature %v, want %v", c.args, got, c.want)
		}
		if err := model.Close(); err != nil {
			t.Error(err)
		}
	}
	dir := writeModel(t, nil)
	text := func(args ...string) string {
		_, out, _ := leanlm(t, "", append([]string{"generate", "-m", dir, "-p", "abc", "-n", "30", "-seed", "5"}, args...)...)
		return out
	}
	if a, b := text("-top-k", "5"), text("-top-k", "5", "-temp", "1"); a != b || a == text() {
		t.Errorf("%q, %q, without chance %q", a, b, text())
	}
}

// TestSeed: without -seed texts differ, and the seed that is told makes one again. Texts that are not drawn have no seed.
func TestSeed(t *testing.T) {
	dir := writeModel(t, nil)
	args := []string{"generate", "-m", dir, "-p", "abc", "-p", "x", "-n", "40", "-temp", "2"}
	texts := map[string]bool{}
	for range 3 {
		_, text, errs := leanlm(t, "", args...)
		var seed uint64
		_, line, _ := strings.Cut("\n"+errs, "\nseed ")
		if _, err := fmt.Sscan(line, &seed); err != nil {
			t.Fatalf("no seed in %s", errs)
		}
		if _, again, _ := leanlm(t, "", append(args, "-seed", fmt.Sprint(seed))...); again != text {
			t.Errorf("-seed %d: %q, want %q", seed, again, text)
		}
		d, _ := generated(t, args[1:]...)
		again, _ := generated(t, append(args[1:], "-seed", fmt.Sprint(*d.Stats.Seed))...)
		if again.Texts[0].Text != d.Texts[0].Text || again.Texts[1].Text != d.Texts[1].Text || *again.Stats.Seed != *d.Stats.Seed {
			t.Errorf("%+v, want %+v", again.Texts, d.Texts)
		}
		texts[text], texts[d.Texts[0].Text] = true, true
	}
	if len(texts) < 4 {
		t.Errorf("without a seed there were %d texts of 6", len(texts))
	}
	if d, errs := generated(t, "-m", dir, "-p", "a", "-n", "2"); d.Stats.Seed != nil || strings.Contains(errs, "seed") {
		t.Errorf("a seed of a text that is not drawn: %s", errs)
	}
}

// TestJSONTexts: the document has the texts that are written without -json, the tokens of the prompts, and nothing after an error.
func TestJSONTexts(t *testing.T) {
	dir := writeModel(t, nil)
	prompts := []string{"abc <&> é", "x"}
	for _, flags := range [][]string{nil, {"-draft", "3"}, {"-temp", "1", "-seed", "3"}, {"-np", "1"}} {
		args := append([]string{"-m", dir, "-n", "9", "-p", prompts[0], "-p", prompts[1]}, flags...)
		d, _ := generated(t, args...)
		_, plain, _ := leanlm(t, "", append([]string{"generate", "-exact"}, args...)...)
		if want := fmt.Sprintf("%s%s\n\n%s%s\n", prompts[0], d.Texts[0].Text, prompts[1], d.Texts[1].Text); plain != want {
			t.Errorf("%v: the text is %q, in JSON %q", flags, plain, want)
		}
		if d.Model != dir || d.Device != "cpu" {
			t.Errorf("%v: %+v", flags, d)
		}
		for i, x := range d.Texts {
			if x.Prompt != prompts[i] || len(x.PromptTokens) != 1+len(prompts[i]) || x.Reason != "length" || len(x.Tokens) != 9 || x.LogProbs != nil {
				t.Errorf("%v: %+v", flags, x)
			}
		}
	}
	if status, out, _ := leanlm(t, "", "generate", "-m", dir, "-json", "-p", strings.Repeat("x", 99)); status != exitError || out != "" {
		t.Errorf("status %d, %q", status, out)
	}
}

// cancelAfter cancels a context when the given number of bytes was written.
type cancelAfter struct {
	bytes.Buffer
	n      int
	cancel func()
}

func (w *cancelAfter) Write(p []byte) (int, error) {
	n, err := w.Buffer.Write(p)
	if w.Len() >= w.n {
		w.cancel()
	}
	return n, err
}

// TestManyPrompts: the cache is as large as the texts of a batch need, for any number of prompts.
func TestManyPrompts(t *testing.T) {
	fitted := func(n int, args ...string) (tokens, batch int) {
		var g generation
		if err := g.flags().parse(args, streams{nil, io.Discard, io.Discard}); err != nil {
			t.Fatal(err)
		}
		g.fit(slices.Repeat([]decoder.Request{{Prompt: make([]int, 100), Tokens: 2000}}, n))
		return g.model.options.Tokens, g.model.options.Batch
	}
	for _, c := range []struct {
		n             int
		args          []string
		tokens, batch int
	}{
		{1, nil, 4096, 1}, {3, nil, 3 * 2164, 3}, {16, nil, 16 * 2164, 16}, {200_000, nil, 16 * 2164, 16}, {200_000, []string{"-np", "2"}, 2 * 2164, 2},
		{200_000, []string{"-cache-tokens", "5000"}, 5000, 16}, {200_000, []string{"-c", "3000"}, 0, 16},
	} {
		if tokens, batch := fitted(c.n, c.args...); tokens != c.tokens || batch != c.batch {
			t.Errorf("%+v: a cache of %d tokens, a batch of %d", c, tokens, batch)
		}
	}
	dir, file := writeModel(t, nil), filepath.Join(t.TempDir(), "prompts")
	if err := os.WriteFile(file, []byte(strings.Repeat("abc\nx\n", 50)), 0o666); err != nil {
		t.Fatal(err)
	}
	d, _ := generated(t, "-m", dir, "-prompts", file, "-n", "9", "-np", "3")
	for i, x := range d.Texts {
		if want := d.Texts[i%2]; x.Text != want.Text || len(x.Tokens) != 9 {
			t.Errorf("text %d: %q, want %q", i, x.Text, want.Text)
		}
	}
	if len(d.Texts) != 100 || d.Stats.MostTexts != 3 {
		t.Errorf("%d texts, %+v", len(d.Texts), d.Stats)
	}
}

// TestInterruptedTexts: after an interrupt, the text so far was written, and with -json the document has what each text has.
func TestInterruptedTexts(t *testing.T) {
	dir := writeModel(t, nil)
	args := []string{"generate", "-m", dir, "-n", "50", "-exact", "-p", "abc"}
	_, all, _ := leanlm(t, "", args...)
	ctx, cancel := context.WithCancel(t.Context())
	out := &cancelAfter{n: 8, cancel: cancel}
	status := run(ctx, args, streams{nil, out, io.Discard})
	if text, ended := strings.CutSuffix(out.String(), "\n"); status != exitInterrupted || !ended || len(text) < 8 || !strings.HasPrefix(all, text) {
		t.Errorf("status %d, %q of %q", status, out, all)
	}
	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	var nothing bytes.Buffer
	if status := run(ctx, args, streams{nil, &nothing, io.Discard}); status != exitInterrupted || strings.TrimSpace(nothing.String()) != "" {
		t.Errorf("interrupted at once: status %d, %q", status, &nothing)
	}
	for _, steps := range []int{0, 3, 17} {
		ctx := &countdown{t.Context(), steps}
		var out bytes.Buffer
		status := run(ctx, append(args, "-json", "-logprobs", "1"), streams{nil, &out, io.Discard})
		var d document
		if err := json.Unmarshal(out.Bytes(), &d); err != nil || status != exitInterrupted || len(d.Texts) != 1 {
			t.Fatalf("%d: status %d, %v, %q", steps, status, err, &out)
		}
		if x := d.Texts[0]; x.Reason != "cancelled" || !strings.HasPrefix(all, x.Text) || len(x.Tokens) != len(x.Text) || len(x.LogProbs) != len(x.Tokens) {
			t.Errorf("%d: %+v", steps, x)
		}
	}
}

// TestLogProbs: log-probabilities are those of the model: they sum to 1 over the vocabulary, and do not depend on how tokens are
// chosen.
func TestLogProbs(t *testing.T) {
	dir := writeModel(t, nil)
	args := []string{"-m", dir, "-p", "abc", "-p", "zzzz", "-n", "8", "-logprobs", "264"}
	greedy, _ := generated(t, args...)
	for _, x := range greedy.Texts {
		if len(x.LogProbs) != len(x.Tokens) {
			t.Fatalf("%d tokens, %d probabilities", len(x.Tokens), len(x.LogProbs))
		}
		for i, p := range x.LogProbs {
			sum := 0.0
			for j, other := range p.Top {
				sum += math.Exp(other.LogProb)
				if j > 0 && (other.LogProb > p.Top[j-1].LogProb || other.LogProb == p.Top[j-1].LogProb && other.Token < p.Top[j-1].Token) {
					t.Errorf("%d: not in order: %+v", i, p.Top[j-1:j+1])
				}
			}
			if len(p.Top) != 264 || math.Abs(sum-1) > 1e-6 || p.Token != x.Tokens[i] || p.Token != p.Top[0].Token || p.LogProb != p.Top[0].LogProb || p.Text != x.Text[i:i+1] {
				t.Errorf("%d: sum %v, %+v", i, sum, p.Token)
			}
		}
	}
	drawn, _ := generated(t, append(slices.Clone(args), "-temp", "0.5", "-top-k", "7", "-seed", "3")...)
	for i, x := range drawn.Texts {
		for j := range 9 {
			if a, b := x.LogProbs[0].Top[j], greedy.Texts[i].LogProbs[0].Top[j]; a.Token != b.Token || a.LogProb != b.LogProb {
				t.Errorf("text %d: %+v, without chance %+v", i, a, b)
			}
		}
	}
	few, _ := generated(t, "-m", dir, "-p", "abc", "-n", "8", "-logprobs", "3")
	for i, p := range few.Texts[0].LogProbs {
		for j := range p.Top {
			if whole := greedy.Texts[0].LogProbs[i].Top[j]; p.Top[j].Token != whole.Token || math.Abs(p.Top[j].LogProb-whole.LogProb) > 1e-4 {
				t.Errorf("%d: %+v, want %+v", i, p.Top[j], whole)
			}
		}
		if len(p.Top) != 3 {
			t.Errorf("%d of the most likely", len(p.Top))
		}
	}
}

// TestParseSpecial: -parse-special makes names of special tokens tokens.
func TestParseSpecial(t *testing.T) {
	const prompt = "a</s>b"
	spelled, _ := generated(t, "-p", prompt, "-n", "1")
	tokens, _ := generated(t, "-p", prompt, "-n", "1", "-parse-special")
	if x, y := spelled.Texts[0].PromptTokens, tokens.Texts[0].PromptTokens; len(x) <= 4 || len(y) != 4 || y[0] != 2 || y[2] != 2 || tokens.Texts[0].Prompt != prompt {
		t.Errorf("%v, %v", x, y)
	}
}

// TestSameFlags: each flag of generate is one that ranks must have alike, or one that may differ. A new flag must be put into one of
// the two lists.
func TestSameFlags(t *testing.T) {
	alike := strings.Fields(`c cache-tokens np ub t exact quantised-rows weights ctk edge-layers shard lora temp top-k top-p min-p typical repeat-penalty presence-penalty
		frequency-penalty repeat-last-n s l keep context-shift prompt-cache n n-samples r parse-special sp draft logprobs`)
	var g generation
	f := g.flags()
	f.VisitAll(func(x *flag.Flag) {
		if _, first := f.aliases[x.Name]; !first {
			return
		}
		if a, b := slices.Contains(alike, x.Name), slices.Contains(mayDiffer, x.Name); a == b {
			t.Errorf("-%s: must it be alike on all ranks, or may it differ? The lists have it neither or both", x.Name)
		}
	})
	same := func(args ...string) []string {
		var g generation
		f := g.flags()
		if err := f.parse(args, streams{nil, io.Discard, io.Discard}); err != nil {
			t.Fatal(err)
		}
		model, err := g.model.open()
		if err != nil {
			t.Fatal(err)
		}
		defer model.Close()
		list, err := (&together{flags: f}).same(model)
		if err != nil {
			t.Fatal(err)
		}
		return list
	}
	base := same()
	for _, args := range [][]string{{"-stats"}, {"-json"}, {"-p", "x"}, {"-m", writeShipped(t)}} {
		if got := same(args...); !slices.Equal(got, base) {
			t.Errorf("%v: %q, want %q", args, got, base)
		}
	}
	for _, args := range [][]string{{"-n", "3"}, {"-temp", "1"}, {"-seed", "4"}, {"-exact"}, {"-stop", "a"}, {"-weights", "f16"}, {"-logit-bias", "3=1"}, {"-keep", "2"}, {"-m", writeModel(t, nil)}} {
		if slices.Equal(same(args...), base) {
			t.Errorf("%v makes no difference", args)
		}
	}
}
