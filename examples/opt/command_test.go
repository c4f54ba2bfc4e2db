package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/examples/opt/model"
	"gorgonia.org/leanattention/internal/rankstest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/script"

	"go.uber.org/goleak"
)

// TestMain is also the command itself, for tests that need a process of it.
func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		main()
	}
	reftest.PoisonOutputs()
	goleak.VerifyTestMain(rankstest.Main{M: m})
}

const asCommand = "OPT_TEST_AS_COMMAND"

// command runs the command and returns its exit status and outputs.
func command(t testing.TB, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	return commandWith(t, "", args...)
}

// commandWith runs it with a text on standard input.
func commandWith(t testing.TB, stdin string, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	status = run(context.Background(), args, strings.NewReader(stdin), &out, &err)
	return status, out.String(), err.String()
}

// writeModel makes a folder with random weights and the plainest of
// vocabularies: a token for each byte. The text that it writes is of small
// letters, since the head's rows of all other bytes are 0, and so their logits.
func writeModel(t testing.TB, change func(config map[string]any)) string {
	t.Helper()
	dir := t.TempDir()
	config := map[string]any{
		"model_type": "opt", "vocab_size": 264, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2,
		"num_attention_heads": 4, "max_position_embeddings": 64, "eos_token_id": 2, "tie_word_embeddings": false,
	}
	if change != nil {
		change(config)
	}
	write := func(name string, data []byte) {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	writeJSON := func(name string, v any) {
		data, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		write(name, data)
	}
	writeJSON("config.json", config)

	vocab, c := map[string]int{"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}, 0x100
	for b := range 256 {
		r := rune(b)
		if b < 0x21 || b > 0x7e && b < 0xa1 || b == 0xad {
			r = rune(c)
			c++
		}
		vocab[string(r)] = 4 + b
	}
	writeJSON("vocab.json", vocab)
	write("merges.txt", []byte("#version: 0.2\n"))

	number := func(name string) int { return config[name].(int) }
	layers, hidden, ffn := number("num_hidden_layers"), number("hidden_size"), number("ffn_dim")
	weights := hf.Config{
		VocabSize: number("vocab_size"), HiddenSize: hidden, WordEmbedProjDim: hidden, FFNDim: ffn, Layers: layers,
		Heads: number("num_attention_heads"), MaxPositions: number("max_position_embeddings"),
		DoLayerNormBefore: true, EnableBias: true, LayerNormElementwiseAffine: true,
	}
	rng := rand.New(rand.NewPCG(1, 2))
	header, data := map[string]any{}, []byte{}
	for w := range weights.Weights() {
		begin, scale := len(data), 2/math.Sqrt(float64(w.Shape[len(w.Shape)-1]))
		size := 1
		for _, n := range w.Shape {
			size *= n
		}
		for i := range size {
			v := float32(scale * rng.NormFloat64())
			if len(w.Shape) == 1 { // what all positions share is small
				v *= 0.1
				if strings.HasSuffix(w.Name, "layer_norm.weight") {
					v++
				}
			}
			if id := i / hidden; w.Name == "lm_head.weight" && (id < 4+'a' || id > 4+'z') {
				v = 0
			}
			data = binary.LittleEndian.AppendUint32(data, math.Float32bits(v))
		}
		header[w.Name] = map[string]any{"dtype": "F32", "shape": w.Shape, "data_offsets": []int{begin, len(data)}}
	}
	h, err := json.Marshal(header)
	if err != nil {
		t.Fatal(err)
	}
	for len(h)%8 != 0 {
		h = append(h, ' ')
	}
	write("model.safetensors", append(binary.LittleEndian.AppendUint64(nil, uint64(len(h))), append(h, data...)...))
	return dir
}

// TestText: the command's text is what the model says, token for token: the
// same from both attentions, in a batch as alone, and as from a plain loop.
func TestText(t *testing.T) {
	dir := writeModel(t, nil)
	prompts := []string{"A story.", "Once upon a time there was", ""}
	const n = 12
	var alone []string
	for _, prompt := range prompts {
		want := plainLoop(t, dir, prompt, n)
		for _, flags := range [][]string{nil, {"-attn", "default"}, {"-attn", "fused"}, {"-attn", "fixed"}, {"-attn", "head"}, {"-linear", "stock"}, {"-weights", "f32"}, {"-workers", "3"}, {"-chunk", "3"}, {"-mixed"}, {"-temperature", "5", "-top-k", "1"}} {
			status, out, log := command(t, append([]string{"-model", dir, "-prompt", prompt, "-n", fmt.Sprint(n)}, flags...)...)
			if status != 0 || out != want+"\n" {
				t.Errorf("prompt %q, flags %v: status %d, text %q, want %q; stderr: %s", prompt, flags, status, out, want, log)
			}
		}
		alone = append(alone, want)
	}
	var want strings.Builder
	for i, prompt := range prompts {
		if i > 0 {
			want.WriteString("\n")
		}
		fmt.Fprintf(&want, "[%d] %s\n%s\n", i+1, prompt, alone[i])
	}
	for _, attention := range []string{"lean", "default", "fused"} {
		args := []string{"-model", dir, "-n", fmt.Sprint(n), "-attn", attention}
		for _, prompt := range prompts {
			args = append(args, "-prompt", prompt)
		}
		if status, out, _ := command(t, args...); status != 0 || out != want.String() {
			t.Errorf("%s: status %d, batch %q, want %q", attention, status, out, want.String())
		}
	}
}

// plainLoop is greedy decoding that computes the whole text anew for each token.
func plainLoop(t *testing.T, dir, prompt string, n int) string {
	t.Helper()
	folder, err := hf.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer folder.Close()
	weights, err := model.Load(folder)
	if err != nil {
		t.Fatal(err)
	}
	tokenizer, err := tokenizer.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	ids := idsOf(t, tokenizer, prompt, false)
	begin := len(ids)
	for range n {
		d, err := weights.NewDecoder(model.Options{Capacity: []int{len(ids)}})
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Prefill(context.Background(), [][]int{ids}, nil); err != nil {
			t.Fatal(err)
		}
		best, logits := 0, d.Logits(0)
		for i := range logits {
			if logits[i] > logits[best] {
				best = i
			}
		}
		d.Close()
		if best == 2 {
			break
		}
		if ids = append(ids, best); len(ids) > 64 {
			break
		}
	}
	return tokenizer.Decode(ids[begin:])
}

// TestEnds: a text ends at </s>, at -n, and at the model's last position, each
// sequence of a batch by itself.
func TestEnds(t *testing.T) {
	dir := writeModel(t, nil)
	count := func(args ...string) (int, string) {
		status, out, log := command(t, append([]string{"-model", dir, "-stats"}, args...)...)
		if status != 0 {
			t.Fatalf("%v: status %d, %s", args, status, log)
		}
		decoded := 0
		for _, line := range strings.Split(log, "\n") {
			fmt.Sscanf(line, "decode %d tokens", &decoded)
		}
		return decoded, out
	}
	// Of n tokens the last is not read again.
	if n, _ := count("-prompt", "abc", "-n", "5"); n != 4 {
		t.Errorf("-n 5 decoded %d tokens", n)
	}
	if n, _ := count("-prompt", "abc", "-n", "1"); n != 0 {
		t.Errorf("-n 1 decoded %d tokens", n)
	}
	// </s> and 3 bytes leave 60 of 64 positions.
	if n, _ := count("-prompt", "abc", "-n", fmt.Sprint(math.MaxInt)); n != 60 {
		t.Errorf("to the last position: decoded %d tokens", n)
	}
	if n, _ := count("-prompt", strings.Repeat("x", 63), "-n", "1000"); n != 0 {
		t.Errorf("a prompt as long as the model: decoded %d tokens", n)
	}
	// A batch: one of them is full at once.
	if n, _ := count("-prompt", strings.Repeat("x", 63), "-prompt", "abc", "-n", "1000"); n != 60 {
		t.Errorf("batch: decoded %d tokens", n)
	}

	// A model that says after k tokens what is now its end of text.
	_, all := count("-prompt", "abc", "-n", "40")
	end := 1
	for strings.IndexByte(all, all[end]) < end {
		end++ // to the first letter that is not there before
	}
	dir = writeModel(t, func(c map[string]any) { c["eos_token_id"] = 4 + int(all[end]) })
	status, out, _ := command(t, "-model", dir, "-prompt", "abc", "-n", "40")
	if want := all[:end] + "\n"; status != 0 || out != want {
		t.Errorf("with an end of text in %q: status %d, %q, want %q", all, status, out, want)
	}
}

func TestSampling(t *testing.T) {
	dir := writeModel(t, nil)
	text := func(flags ...string) string {
		status, out, log := command(t, append([]string{"-model", dir, "-prompt", "abc", "-temperature", "2", "-seed", "7"}, flags...)...)
		if status != 0 {
			t.Fatalf("%v: status %d, %s", flags, status, log)
		}
		return out
	}
	if a, b := text(), text(); a != b {
		t.Errorf("the same seed gave %q and %q", a, b)
	}
	if a, b := text(), text("-seed", "1"); a == b {
		t.Errorf("two seeds gave %q", a)
	}
	if a, b := text(), text("-top-k", "2"); a == b {
		t.Errorf("-top-k 2 changed nothing: %q", a)
	}
	if a, b := text(), text("-top-p", "0.1"); a == b {
		t.Errorf("-top-p 0.1 changed nothing: %q", a)
	}
	if a, b := text("-cache", "bf16"), text("-cache", "f16"); a == "" || b == "" {
		t.Errorf("half precision gave %q and %q", a, b)
	}
	// Both ways to compute see the rounding of the weights.
	if a, b := text("-weights", "bf16"), text("-weights", "bf16", "-linear", "stock"); a != b || a == text() {
		t.Errorf("weights of bf16 gave %q, with stock linear layers %q, those of f32 %q", a, b, text())
	}
	// The first of a batch has the random numbers that it has alone.
	status, batch, _ := command(t, "-model", dir, "-prompt", "abc", "-prompt", "zz", "-temperature", "2", "-seed", "7")
	if status != 0 || !strings.HasPrefix(batch, "[1] abc\n"+text()+"\n[2] zz\n") {
		t.Errorf("status %d, batch %q, alone %q", status, batch, text())
	}
}

// TestActivation: a model with a GELU says the same in every kind of graph, and something
// else than the model with the same weights and a ReLU.
func TestActivation(t *testing.T) {
	text := func(dir string, flags ...string) string {
		status, out, log := command(t, append([]string{"-model", dir, "-prompt", "abc", "-n", "40"}, flags...)...)
		if status != 0 {
			t.Fatalf("%v: status %d, %s", flags, status, log)
		}
		return out
	}
	dir := writeModel(t, func(c map[string]any) { c["activation_function"] = "gelu" })
	want := text(dir)
	if relu := text(writeModel(t, nil)); want == relu {
		t.Errorf("a GELU and a ReLU both say %q", want)
	}
	for _, flags := range [][]string{{"-linear", "stock"}, {"-attn", "default"}, {"-attn", "fused"}, {"-attn", "default", "-linear", "stock"}} {
		if got := text(dir, flags...); got != want {
			t.Errorf("%v: %q, want %q", flags, got, want)
		}
	}
}

// TestScript: the exit status and the last line on standard error where something is wrong. Nothing is on standard
// output then. The script's $name is a folder that is made here.
func TestScript(t *testing.T) {
	dir, empty := writeModel(t, nil), t.TempDir()
	llama := writeModel(t, func(c map[string]any) { c["model_type"] = "llama" })
	gelu := writeModel(t, func(c map[string]any) { c["activation_function"] = "gelu_new" })
	broken := func(name string, change func([]byte) []byte) string {
		dir := writeModel(t, nil)
		path := filepath.Join(dir, name)
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, change(data), 0o666); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	cut := broken("model.safetensors", func(b []byte) []byte { return b[:len(b)/2] })
	noVocab := broken("vocab.json", func([]byte) []byte { return []byte("{") })
	nan := broken("model.safetensors", func(b []byte) []byte {
		for i := len(b) / 2; i+4 <= len(b); i += 4 {
			binary.LittleEndian.PutUint32(b[i:], math.Float32bits(float32(math.NaN())))
		}
		return b
	})
	large := broken("model.safetensors", func(b []byte) []byte {
		binary.LittleEndian.PutUint32(b[len(b)-4:], math.Float32bits(1e6)) // lm_head's last
		return b
	})
	folders := map[string]string{"none": filepath.Join(empty, "none"), "empty": empty, "model": dir, "llama": llama, "gelu": gelu, "cut": cut, "novocab": noVocab, "nan": nan, "large": large}
	script.Run(t, "testdata/command.txt", func(words []string) (string, error) {
		if words[0] != "opt" {
			t.Fatalf("no command %q", words[0])
		}
		args := slices.Clone(words[1:])
		for i, arg := range args {
			if name, ok := strings.CutPrefix(arg, "$"); ok {
				args[i] = folders[name]
			}
		}
		status, out, log := command(t, args...)
		names := slices.SortedFunc(maps.Keys(folders), func(a, b string) int { return len(folders[b]) - len(folders[a]) })
		for _, name := range names { // a folder within another one first
			log = strings.ReplaceAll(log, folders[name], "$"+name)
		}
		lines := strings.Split(strings.TrimSuffix(log, "\n"), "\n")
		last := lines[len(lines)-1]
		if status == 0 || strings.TrimSpace(out) != "" || !strings.HasPrefix(last, "opt: ") {
			return "", fmt.Errorf("status %d, stdout %q, stderr %q", status, out, log)
		}
		return fmt.Sprintf("%d %s", status, strings.ReplaceAll(last, syscall.ENOENT.Error(), "no such file or directory")), nil
	})
	if status, out, log := command(t, "-h"); status != 0 || out != "" || !strings.Contains(log, "-temperature") {
		t.Errorf("-h: status %d, %q", status, log)
	}
	if status, _, log := command(t, "-prompt", "a", "-model", dir, "-workers", "4096", "-n", "2"); status != 0 {
		t.Errorf("the most workers: status %d, %s", status, log)
	}
}

// interrupting cancels a context when so many bytes were written.
type interrupting struct {
	text   []byte
	after  int
	cancel func()
}

func (w *interrupting) Write(p []byte) (int, error) {
	if w.text = append(w.text, p...); len(w.text) >= w.after {
		w.cancel()
	}
	return len(p), nil
}

// TestInterrupt: what was decoded is written, complete and in order.
func TestInterrupt(t *testing.T) {
	dir := writeModel(t, nil)
	for _, attention := range []string{"lean", "default", "fused"} {
		args := []string{"-model", dir, "-attn", attention, "-n", "50", "-prompt", "abc"}
		_, all, _ := command(t, args...)
		ctx, cancel := context.WithCancel(context.Background())
		out, log := &interrupting{after: 8, cancel: cancel}, &bytes.Buffer{}
		status := run(ctx, args, nil, out, log)
		cancel()
		text, ended := strings.CutSuffix(string(out.text), "\n")
		if status != 130 || !ended || len(text) < 8 || len(text) > 12 || !strings.HasPrefix(all, text) {
			t.Errorf("%s: status %d, %q of %q; stderr: %s", attention, status, out.text, all, log)
		}

		// Two texts: both are written as far as they got.
		ctx, cancel = context.WithCancel(context.Background())
		out = &interrupting{after: 16, cancel: cancel}
		status = run(ctx, append(args, "-prompt", "abc"), nil, out, log)
		cancel()
		_, body, _ := strings.Cut(string(out.text), "[1] abc\n")
		first, second, found := strings.Cut(body, "\n\n[2] abc\n")
		if status != 130 || !found || first+"\n" != second || !strings.HasPrefix(all, first) {
			t.Errorf("%s: status %d, %q of %q", attention, status, out.text, all)
		}

		// Before anything was decoded.
		ctx, cancel = context.WithCancel(context.Background())
		cancel()
		var nothing bytes.Buffer
		if status := run(ctx, args, nil, &nothing, io.Discard); status != 130 || nothing.String() != "" {
			t.Errorf("%s: interrupted at once: status %d, %q", attention, status, nothing.String())
		}
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("disk full") }

func TestOutputError(t *testing.T) {
	dir, log := writeModel(t, nil), &bytes.Buffer{}
	status := run(context.Background(), []string{"-model", dir, "-prompt", "abc"}, nil, full{}, log)
	if status != 1 || !strings.HasSuffix(log.String(), "\nopt: disk full\n") {
		t.Errorf("status %d, %s", status, log)
	}
}

func TestStatsDevice(t *testing.T) {
	for device, want := range map[string]string{"": "prefill", "GPU 0 (NVIDIA H200)": "device   GPU 0 (NVIDIA H200)\nprefill"} {
		var log bytes.Buffer
		writeStats(&log, model.Stats{Device: device})
		if !strings.HasPrefix(log.String(), want) {
			t.Errorf("%q: %s", device, log.String())
		}
	}
}

func TestStats(t *testing.T) {
	dir := writeModel(t, nil)
	for _, attention := range []string{"lean", "default", "fused"} {
		status, _, log := command(t, "-model", dir, "-attn", attention, "-prompt", "abcdef", "-prompt", "ab", "-n", "9", "-stats")
		var read, decoded, runs int
		var seconds, rate, ms, share, each float64
		for _, line := range strings.Split(log, "\n") {
			fmt.Sscanf(line, "prefill %d tokens", &read)
			fmt.Sscanf(line, "decode %d tokens in %f s: %f tokens/s, %f ms a token, attention %f%% (%d runs of the graph, %f ms each)",
				&decoded, &seconds, &rate, &ms, &share, &runs, &each)
		}
		if status != 0 || read != 10 || decoded != 16 || runs != 8 {
			t.Errorf("%s: status %d, read %d, decoded %d, runs %d: %s", attention, status, read, decoded, runs, log)
		}
		var first, parts [3]float64
		var bytes, speed, ofCeiling, ceiling float64 // ofCeiling is 0.0 where the machine had other work
		told := 0
		for _, line := range strings.Split(log, "\n") {
			if n, _ := fmt.Sscanf(line, "first token after %f s: %f loading, %f for graphs and copies of weights, %f for a prompt",
				&first[0], &parts[0], &parts[1], &parts[2]); n == 4 {
				told++
			}
			if n, _ := fmt.Sscanf(line, "reads %f MB a run of decode, %f GB/s: %f%% of the %f GB/s of their memory", &bytes, &speed, &ofCeiling, &ceiling); n == 4 {
				told++
			}
		}
		if d := first[0] - parts[0] - parts[1] - parts[2]; math.Abs(d) > 0.003 || first[0] <= 0 {
			t.Errorf("%s: the first token: %s", attention, log)
		}
		if want := map[string]int{"lean": 2, "default": 2, "fused": 1}[attention]; told != want || want == 2 && (bytes <= 0 || ceiling <= 0) {
			t.Errorf("%s: what was read: %s", attention, log)
		}
		if rate <= 0 || ms <= 0 || each < ms || share <= 0 || share >= 100 {
			t.Errorf("%s: %s", attention, log)
		}
		if _, _, log := command(t, "-model", dir, "-prompt", "a", "-n", "2"); strings.Contains(log, "tokens/s") {
			t.Errorf("statistics without -stats: %s", log)
		}
	}
}

func TestPrinter(t *testing.T) {
	var w bytes.Buffer
	p := newPrinter(&w, []string{"one", strings.Repeat("word ", 20), "three\n3"})
	step := func(want string, do func() error) {
		t.Helper()
		w.Reset()
		if err := do(); err != nil || w.String() != want {
			t.Errorf("wrote %q, want %q (error %v)", w.String(), want, err)
		}
	}
	step("a", func() error { return p.add(0, "a") })
	step("", func() error { return p.add(2, "x") })
	step("", func() error { return p.add(1, "é") })
	step("", func() error { return p.end(2) })
	step("b", func() error { return p.add(0, "b") })
	step("\n\n[2] word word word word word word word word word word word word...\né", func() error { return p.end(0) })
	step("f", func() error { return p.add(1, "f") })
	step("\n\n[3] three 3\nx\n", func() error { return p.end(1) })
}

// TestShipped: the model that is part of the program writes the same text with
// both attentions, in a batch as alone.
func TestShipped(t *testing.T) {
	prompts := []string{"Once upon a time", "In the morning"}
	var alone []string
	for _, prompt := range prompts {
		status, lean, log := command(t, "-prompt", prompt, "-n", "200")
		if status != 0 || len(lean) < 50 {
			t.Fatalf("status %d, %q, %s", status, lean, log)
		}
		if status, stock, log := command(t, "-prompt", prompt, "-n", "200", "-attn", "default"); status != 0 || stock != lean {
			t.Errorf("status %d, default wrote %q, lean %q; %s", status, stock, lean, log)
		}
		alone = append(alone, lean)
	}
	want := fmt.Sprintf("[1] %s\n%s\n[2] %s\n%s", prompts[0], alone[0], prompts[1], alone[1])
	if status, both, log := command(t, "-prompt", prompts[0], "-prompt", prompts[1], "-n", "200"); status != 0 || both != want {
		t.Errorf("status %d, batch %q, want %q; %s", status, both, want, log)
	}
}

// idsOf returns the ids of a text, with the tokens around it unless it is bare.
func idsOf(t testing.TB, tokens *tokenizer.Tokenizer, text string, bare bool) []int {
	t.Helper()
	ids, err := tokens.Encode(text, tokenizer.Options{Bare: bare})
	if err != nil {
		t.Fatal(err)
	}
	return ids
}
