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
)

// Every flag has a line in -h with its default.
func TestHelp(t *testing.T) {
	_, _, help := command(t, "-h")
	entries := strings.Split(help, "\n  -")[1:]
	var o options
	var n named
	f, count := newFlags(&o, &n), 0
	f.VisitAll(func(f *flag.Flag) {
		count++
		for _, e := range entries {
			if name, _, _ := strings.Cut(strings.Fields(e)[0], " "); name == f.Name {
				if !strings.HasSuffix(strings.TrimSpace(e), ")") || !strings.Contains(e, "(default ") || strings.Contains(e, "(default )") {
					t.Errorf("no default: %s", e)
				}
				return
			}
		}
		t.Errorf("-%s is not in %s", f.Name, help)
	})
	if count != len(entries) {
		t.Errorf("%d flags and %d entries: %s", count, len(entries), help)
	}
	for _, want := range []string{"-device cpu, gpu, gpu:N or gpu:N,M\n", "(default cpu)", "(default 128)", "(default false)", "(default lean)"} {
		if !strings.Contains(help, want) {
			t.Errorf("no %q in %s", want, help)
		}
	}
	for name := range defaults {
		if f.Lookup(name) == nil {
			t.Errorf("there is no -%s", name)
		}
	}
}

// Texts come from standard input as from flags.
func TestStandardInput(t *testing.T) {
	dir := writeModel(t, nil)
	text := func(stdin string, args ...string) string {
		t.Helper()
		status, out, log := commandWith(t, stdin, append([]string{"-model", dir, "-n", "4"}, args...)...)
		if status != 0 {
			t.Errorf("%v: status %d, %s", args, status, log)
		}
		return out
	}
	for _, c := range []struct {
		stdin      string
		args, same []string
	}{
		{"abc", []string{"-prompt", "-"}, []string{"-prompt", "abc"}},
		{"abc\n", []string{"-prompt", "-"}, []string{"-prompt", "abc"}},
		{"abc\r\n", []string{"-prompt", "-"}, []string{"-prompt", "abc"}},
		{"a\nb\n\n", []string{"-prompt", "-"}, []string{"-prompt", "a\nb\n"}},
		{"", []string{"-prompt", "-"}, []string{"-prompt", ""}},
		{"b\n\nc", []string{"-prompt", "a", "-prompts", "-", "-prompt", "d"}, []string{"-prompt", "a", "-prompt", "b", "-prompt", "c", "-prompt", "d"}},
		{"b", []string{"-prompt", "a", "-prompt", "-"}, []string{"-prompt", "a", "-prompt", "b"}},
	} {
		if got, want := text(c.stdin, c.args...), text("", c.same...); got != want {
			t.Errorf("%v of %q: %q, want %q", c.args, c.stdin, got, want)
		}
	}
	if status, _, log := commandWith(t, "\n\n", "-prompts", "-"); status != 1 || !strings.Contains(log, "-prompts") {
		t.Errorf("no prompts: status %d, %s", status, log)
	}
}

// endless is a standard input without end.
type endless struct{}

func (endless) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// What is read is bounded, an error of it is told, and an interrupt does not wait for
// it.
func TestInputBounds(t *testing.T) {
	for _, flags := range [][]string{{"-prompt", "-"}, {"-prompts", "-"}, {"-perplexity", "-"}} {
		var log bytes.Buffer
		if status := run(context.Background(), flags, endless{}, io.Discard, &log); status != 1 || !strings.Contains(log.String(), "standard input: more than ") {
			t.Errorf("%v: status %d, %s", flags, status, &log)
		}
		log.Reset()
		if status := run(context.Background(), flags, iotest.ErrReader(io.ErrClosedPipe), io.Discard, &log); status != 1 || !strings.Contains(log.String(), io.ErrClosedPipe.Error()) {
			t.Errorf("%v: status %d, %s", flags, status, &log)
		}
		ctx, cancel := context.WithCancel(context.Background())
		time.AfterFunc(10*time.Millisecond, cancel)
		r, w := io.Pipe()
		if status := run(ctx, flags, r, io.Discard, &log); status != 130 {
			t.Errorf("%v: status %d, %s", flags, status, &log)
		}
		cancel()
		w.Close()
	}
	if _, err := os.Stat("/dev/zero"); err == nil {
		if status, _, log := command(t, "-prompts", "/dev/zero"); status != 1 || !strings.Contains(log, "/dev/zero: more than ") {
			t.Errorf("status %d, %s", status, log)
		}
	}
}

// -top-k or -top-p asks for sampling: at temperature 1, unless another one is given.
func TestTemperatureOfTop(t *testing.T) {
	for _, c := range []struct {
		args string
		want float64
	}{
		{"-top-k 3", 1}, {"-top-p 0.5", 1}, {"-top-k 3 -temperature 2", 2}, {"-top-p 0.5 -temperature 0.5", 0.5},
		{"", 0}, {"-top-k 0", 0}, {"-top-p 1", 0}, {"-top-p 0", 0}, {"-temperature 0 -top-k 0", 0}, {"-seed 3", 0},
	} {
		o, err := parse(append(strings.Fields(c.args), "-prompt", "a"), io.Discard)
		if err != nil || o.sample.Temperature != c.want {
			t.Errorf("%s: temperature %v, %v, want %v", c.args, o.sample.Temperature, err, c.want)
		}
	}
	dir := writeModel(t, nil)
	text := func(args ...string) string {
		_, out, _ := command(t, append([]string{"-model", dir, "-prompt", "abc", "-n", "30", "-seed", "5"}, args...)...)
		return out
	}
	if a, b := text("-top-k", "5"), text("-top-k", "5", "-temperature", "1"); a != b || a == text() {
		t.Errorf("%q, %q, greedily %q", a, b, text())
	}
}

// Without -seed texts differ, and -stats and -json tell the seed that makes one again.
func TestSeed(t *testing.T) {
	dir := writeModel(t, nil)
	args := []string{"-model", dir, "-prompt", "abc", "-prompt", "x", "-n", "40", "-temperature", "2", "-stats"}
	texts := map[string]bool{}
	for range 3 {
		_, text, log := command(t, args...)
		var seed uint64
		_, line, _ := strings.Cut(log, "\nseed ")
		if _, err := fmt.Sscan(line, &seed); err != nil {
			t.Fatalf("no seed in %s", log)
		}
		if _, again, _ := command(t, append(args, "-seed", fmt.Sprint(seed))...); again != text {
			t.Errorf("-seed %d: %q, want %q", seed, again, text)
		}
		texts[text] = true

		r := jsonOf(t, args[:len(args)-1]...)
		if r.Stats.Seed == nil {
			t.Fatal("no seed")
		}
		again := jsonOf(t, append(args, "-seed", fmt.Sprint(*r.Stats.Seed))...)
		if again.Texts[0].Text != r.Texts[0].Text || again.Texts[1].Text != r.Texts[1].Text || *again.Stats.Seed != *r.Stats.Seed {
			t.Errorf("%+v, want %+v", again.Texts, r.Texts)
		}
		texts[r.Texts[0].Text] = true
	}
	if len(texts) < 4 {
		t.Errorf("without a seed there were %d texts of 6", len(texts))
	}
	if _, _, log := command(t, "-model", dir, "-prompt", "a", "-n", "2", "-stats"); strings.Contains(log, "seed") {
		t.Errorf("a seed of what is not drawn: %s", log)
	}
	if r := jsonOf(t, "-model", dir, "-prompt", "a", "-n", "2"); r.Stats.Seed != nil {
		t.Error("a seed of what is not drawn")
	}
}

// jsonOf runs the command with -json.
func jsonOf(t *testing.T, args ...string) *reportJSON {
	t.Helper()
	status, out, log := command(t, slices.Concat(args, []string{"-json"})...)
	if status != 0 {
		t.Fatalf("%v: status %d, %s", args, status, log)
	}
	return parseReport(t, out)
}

// parseReport reads the one document that there may be.
func parseReport(t *testing.T, out string) *reportJSON {
	t.Helper()
	var r reportJSON
	d := json.NewDecoder(strings.NewReader(out))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		t.Fatalf("%v in %q", err, out)
	}
	if _, err := d.Token(); err != io.EOF {
		t.Fatalf("more than one document: %q", out)
	}
	return &r
}

// -json has what the texts are, and -stats.
func TestJSON(t *testing.T) {
	dir := writeModel(t, nil)
	prompts := []string{"abc <&> é", "x"}
	for _, flags := range [][]string{nil, {"-attn", "default"}, {"-attn", "fused"}, {"-temperature", "1", "-seed", "3"}} {
		args := append([]string{"-model", dir, "-n", "9", "-prompt", prompts[0], "-prompt", prompts[1]}, flags...)
		r := jsonOf(t, args...)
		_, plain, _ := command(t, args...)
		want := fmt.Sprintf("[1] %s\n%s\n\n[2] %s\n%s\n", prompts[0], r.Texts[0].Text, prompts[1], r.Texts[1].Text)
		if plain != want {
			t.Errorf("%v: the text is %q, in JSON %q", flags, plain, want)
		}
		if r.Model != dir || r.Device != "cpu" || r.Perplexity != nil {
			t.Errorf("%v: %+v", flags, r)
		}
		for i, x := range r.Texts {
			folder, tokenizer, err := open(dir)
			if err != nil {
				t.Fatal(err)
			}
			folder.Close()
			if x.Prompt != prompts[i] || !slices.Equal(x.PromptTokens, idsOf(t, tokenizer, prompts[i], false)) || x.Reason != "length" || len(x.Tokens) != 9 || tokenizer.Decode(x.Tokens) != x.Text || x.Logprobs != nil {
				t.Errorf("%v: %+v", flags, x)
			}
		}
		s := r.Stats
		if s.Prefill.Tokens != len(r.Texts[0].PromptTokens)+len(r.Texts[1].PromptTokens) || s.Decode.Tokens != 16 || s.Decode.TokensPerSecond <= 0 || s.Decode.Seconds <= 0 || s.Load <= 0 || s.First <= 0 || (s.Seed != nil) != (len(flags) == 4 && flags[0] == "-temperature") {
			t.Errorf("%v: %+v", flags, s)
		}
	}
	if r := jsonOf(t, "-prompt", "Once", "-n", "1"); r.Model != "the shipped model" || len(r.Texts) != 1 {
		t.Errorf("%+v", r)
	}
	// After an error nothing is there that looks like a whole document.
	if status, out, _ := command(t, "-model", dir, "-json", "-prompt", strings.Repeat("x", 99)); status != 1 || out != "" {
		t.Errorf("status %d, %q", status, out)
	}
}

// Every way in which a text ends has its reason.
func TestReasons(t *testing.T) {
	dir := writeModel(t, nil)
	text := jsonOf(t, "-model", dir, "-prompt", "abc", "-n", "40").Texts[0].Text
	if len(text) != 40 {
		t.Fatalf("%q", text)
	}
	end := 1
	for strings.IndexByte(text, text[end]) < end {
		end++ // to the first letter that is not there before
	}
	for _, c := range []struct {
		want, text string
		tokens     int
		args       []string
	}{
		{"length", text[:7], 7, []string{"-n", "7"}},
		{"length", "", 61, []string{"-n", "61"}}, // to the last position
		{"context", "", 61, []string{"-n", "62"}},
		{"context", "", 61, nil},
		{"stop", text[:end], end + 1, []string{"-stop", text[end : end+1]}},
		{"stop", text[:end], end + 3, []string{"-stop", text[end : end+3]}},
		{"stop", text[:end], end + 3, []string{"-stop", "never", "-stop", text[end : end+3], "-stop", text[end:]}},
		{"stop", "", 3, []string{"-stop", text[:3]}},
		{"length", text[:end+2], end + 2, []string{"-stop", text[end : end+3], "-n", fmt.Sprint(end + 2)}}, // the beginning of a stop text is no stop text
		{"length", text[:9], 9, []string{"-n", "9", "-stop", "never"}},
	} {
		args := append([]string{"-model", dir, "-prompt", "abc"}, c.args...)
		x := jsonOf(t, args...).Texts[0]
		if c.text == "" && c.want != "stop" {
			c.text = x.Text
		}
		context := 0
		if c.want == "context" {
			context = 64
		}
		if x.Context != context || x.Reason != c.want || x.Text != c.text || len(x.Tokens) != c.tokens {
			t.Errorf("%v: %+v, want %+v", c.args, x, c)
		}
		_, plain, log := command(t, args...)
		if plain != c.text+"\n" {
			t.Errorf("%v wrote %q, want %q", c.args, plain, c.text)
		}
		if told := strings.Contains(log, "opt: the text ended early: the context is full, the model has 64 positions\n"); told != (c.want == "context") {
			t.Errorf("%v, %s: %s", c.args, c.want, log)
		}
	}
	if _, _, log := command(t, "-model", dir, "-prompt", "abc", "-prompt", "abc", "-prompt", strings.Repeat("x", 63), "-n", "61"); !strings.Contains(log, "opt: 1 of 3 texts ended early: the context is full") {
		t.Errorf("of three: %s", log)
	}
	// In a batch each text stops by itself, also where tokens are computed ahead.
	for _, ahead := range []bool{false, true} {
		o, err := parse([]string{"-model", dir, "-prompt", "abc", "-prompt", "zz", "-n", "40", "-stop", text[end : end+3], "-json"}, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		o.ahead = ahead
		var out bytes.Buffer
		if err := errorsOf(o.readPrompts(nil), func() error { return generate(context.Background(), o, &out, io.Discard) }); err != nil {
			t.Fatal(err)
		}
		if x := parseReport(t, out.String()).Texts; x[0].Reason != "stop" || x[0].Text != text[:end] || len(x[0].Tokens) != end+3 {
			t.Errorf("ahead %v: %+v", ahead, x)
		}
	}
	eos := writeModel(t, func(c map[string]any) { c["eos_token_id"] = 4 + int(text[end]) })
	if x := jsonOf(t, "-model", eos, "-prompt", "abc", "-n", "40").Texts[0]; x.Reason != "eos" || x.Text != text[:end] || len(x.Tokens) != end {
		t.Errorf("end of text: %+v", x)
	}
	if x := jsonOf(t, "-model", eos, "-prompt", "abc", "-n", "40", "-stop", text[end-1:end]).Texts[0]; x.Reason != "stop" || x.Text != text[:strings.Index(text, text[end-1:end])] {
		t.Errorf("a stop text before the end of text: %+v", x)
	}
}

// Flags of other programs that name those of this one.
func TestOtherNames(t *testing.T) {
	var o options
	var n named
	f := newFlags(&o, &n)
	for other, own := range otherNames {
		if f.Lookup(other) != nil || f.Lookup(own) == nil {
			t.Errorf("-%s for -%s", other, own)
		}
	}
}

func errorsOf(err error, then func() error) error {
	if err != nil {
		return err
	}
	return then()
}

// After an interrupt the document is there, with what was decoded.
func TestJSONInterrupt(t *testing.T) {
	dir := writeModel(t, nil)
	all := jsonOf(t, "-model", dir, "-prompt", "abc", "-n", "50").Texts[0].Text
	for calls := range 20 {
		o, err := parse([]string{"-model", dir, "-prompt", "abc", "-n", "50", "-json", "-logprobs", "1"}, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		o.prompts = []string{"abc"}
		var out bytes.Buffer
		err = generate(&countdown{Context: context.Background(), calls: calls}, o, &out, io.Discard)
		if err == nil || !strings.Contains(err.Error(), context.Canceled.Error()) {
			t.Fatalf("after %d steps: %v", calls, err)
		}
		x := parseReport(t, out.String()).Texts[0]
		if x.Reason != "interrupt" || !strings.HasPrefix(all, x.Text) || len(x.Tokens) != max(0, calls) || len(x.Tokens) != len(x.Text) || len(x.Logprobs) != len(x.Tokens) {
			t.Errorf("after %d steps: %+v", calls, x)
		}
	}
}

// Log-probabilities are those of the model: they add up to 1 over the vocabulary, and
// do not depend on how tokens are chosen.
func TestLogprobs(t *testing.T) {
	dir := writeModel(t, nil)
	args := []string{"-model", dir, "-prompt", "abc", "-prompt", "zzzz", "-n", "8", "-logprobs", "264"}
	greedy := jsonOf(t, args...)
	for _, x := range greedy.Texts {
		if len(x.Logprobs) != len(x.Tokens) {
			t.Fatalf("%d tokens, %d probabilities", len(x.Tokens), len(x.Logprobs))
		}
		for i, p := range x.Logprobs {
			sum := 0.0
			for j, other := range p.Top {
				sum += math.Exp(other.Logprob)
				if j > 0 && (other.Logprob > p.Top[j-1].Logprob || other.Logprob == p.Top[j-1].Logprob && other.Token < p.Top[j-1].Token) {
					t.Errorf("%d: not in order: %+v", i, p.Top[j-1:j+1])
				}
			}
			if len(p.Top) != 264 || math.Abs(sum-1) > 1e-6 || p.Token != x.Tokens[i] || p.tokenJSON != p.Top[0] || p.Text != x.Text[i:i+1] {
				t.Errorf("%d: sum %v, %+v", i, sum, p.tokenJSON)
			}
		}
	}
	// The same by the forward pass of another run, whatever chooses.
	sampled := jsonOf(t, append(slices.Clone(args), "-temperature", "0.5", "-top-k", "7", "-seed", "3")...)
	for i, x := range sampled.Texts {
		if a, b := x.Logprobs[0].Top, greedy.Texts[i].Logprobs[0].Top; !slices.Equal(a[:9], b[:9]) {
			t.Errorf("text %d: %v, greedily %v", i, a[:9], b[:9])
		}
	}
	few := jsonOf(t, "-model", dir, "-prompt", "abc", "-n", "8", "-logprobs", "3")
	for i, p := range few.Texts[0].Logprobs {
		whole := greedy.Texts[0].Logprobs[i]
		for j := range p.Top {
			if p.Top[j].Token != whole.Top[j].Token || math.Abs(p.Top[j].Logprob-whole.Top[j].Logprob) > 1e-4 {
				t.Errorf("%d: %+v, want %+v", i, p.Top[j], whole.Top[j])
			}
		}
		if len(p.Top) != 3 {
			t.Errorf("%d of the most likely", len(p.Top))
		}
	}
	// Equal logits, and tokens that are never chosen.
	c := likelihood([]float32{1, 3, float32(math.Inf(-1)), 3, 2}, 4, 3)
	if c.Top[0].Token != 1 || c.Top[1].Token != 3 || c.Top[2].Token != 4 || c.Logprob != c.Top[2].Logprob {
		t.Errorf("%+v", c)
	}
	if c := likelihood([]float32{1, float32(math.Inf(-1))}, 0, 3); len(c.Top) != 1 || c.Logprob != 0 {
		t.Errorf("%+v", c)
	}
}

// -special makes names of special tokens tokens.
func TestSpecial(t *testing.T) {
	_, tokenizer, err := open("")
	if err != nil {
		t.Fatal(err)
	}
	const prompt = "a</s>b"
	id := func(token string) int {
		id, ok := tokenizer.ID(token)
		if !ok {
			t.Fatalf("no token %q", token)
		}
		return id
	}
	for special, want := range map[bool][]int{false: idsOf(t, tokenizer, prompt, false), true: {2, id("a"), 2, id("b")}} {
		flag := fmt.Sprintf("-special=%v", special)
		if x := jsonOf(t, "-prompt", prompt, "-n", "2", flag).Texts[0]; !slices.Equal(x.PromptTokens, want) || x.Prompt != prompt {
			t.Errorf("%s: %v, want %v", flag, x.PromptTokens, want)
		}
		file := filepath.Join(t.TempDir(), "text")
		if err := os.WriteFile(file, []byte(prompt), 0o600); err != nil {
			t.Fatal(err)
		}
		if p := jsonOf(t, "-perplexity", file, flag).Perplexity; p.Of != len(want) {
			t.Errorf("-perplexity %s: %d tokens, want %d", flag, p.Of, len(want))
		}
	}
	if n := len(idsOf(t, tokenizer, prompt, false)); n <= 4 {
		t.Errorf("spelled out it has %d tokens", n)
	}
}
