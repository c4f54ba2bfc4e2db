package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"unicode"

	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/decoder/tokenizer"
)

// writeModel writes a folder of an OPT model with random weights, 64 positions and a token for each byte. The model writes small
// letters: the head's rows of all other bytes are 0, and so are their logits.
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
	marshal := func(v any) []byte {
		data, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	write("config.json", marshal(config))

	vocabulary, c := map[string]int{"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}, 0x100
	for b := range 256 {
		r := rune(b)
		if b < 0x21 || b > 0x7e && b < 0xa1 || b == 0xad {
			r = rune(c)
			c++
		}
		vocabulary[string(r)] = 4 + b
	}
	write("vocab.json", marshal(vocabulary))
	write("merges.txt", []byte("#version: 0.2\n"))

	network, err := decoder.ReadNetwork(marshal(config), 0)
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	header, data := map[string]any{}, []byte{}
	for w := range network.Weights() {
		begin, scale, size := len(data), 2/math.Sqrt(float64(w.Shape[len(w.Shape)-1])), 1
		for _, n := range w.Shape {
			size *= n
		}
		for i := range size {
			v := float32(scale * rng.NormFloat64())
			if len(w.Shape) == 1 { // all positions have the same, so it is small
				v *= 0.1
				if strings.HasSuffix(w.Name, "layer_norm.weight") {
					v++
				}
			}
			if w.Name == "lm_head.weight" {
				if id := i / w.Shape[1]; id < 4+'a' || id > 4+'z' {
					v = 0
				}
			}
			data = binary.LittleEndian.AppendUint32(data, math.Float32bits(v))
		}
		header[w.Name] = map[string]any{"dtype": "F32", "shape": w.Shape, "data_offsets": []int{begin, len(data)}}
	}
	h := marshal(header)
	for len(h)%8 != 0 {
		h = append(h, ' ')
	}
	write("model.safetensors", append(binary.LittleEndian.AppendUint64(nil, uint64(len(h))), append(h, data...)...))
	return dir
}

// generated runs leanlm generate with -json and without -exact's rounding, and returns its document.
func generated(t testing.TB, args ...string) (d document, errs string) {
	t.Helper()
	status, out, errs := leanlm(t, "", append([]string{"generate", "-exact", "-json"}, args...)...)
	if status != 0 {
		t.Fatalf("%v: status %d, %s", args, status, errs)
	}
	return parseDocument(t, out), errs
}

// parseDocument reads the one document that there is.
func parseDocument(t testing.TB, out string) (d document) {
	t.Helper()
	decoder := json.NewDecoder(strings.NewReader(out))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&d); err != nil || decoder.More() {
		t.Fatalf("%v in %q", err, out)
	}
	return d
}

// firstNew returns the index of the first letter, except the very first one, that is not there before.
func firstNew(text string) int {
	end := 1
	for strings.IndexByte(text, text[end]) < end {
		end++
	}
	return end
}

// TestReasons: each way in which a text ends has its reason, and the text ends before the stop text.
func TestReasons(t *testing.T) {
	dir := writeModel(t, nil)
	d, _ := generated(t, "-m", dir, "-p", "abc", "-n", "40")
	text := d.Texts[0].Text
	if len(text) != 40 {
		t.Fatalf("%q", text)
	}
	end := firstNew(text)
	eos := writeModel(t, func(c map[string]any) { c["eos_token_id"] = 4 + int(text[end]) })
	for _, c := range []struct {
		want, text string
		tokens     int
		args       []string
	}{
		{"length", text[:7], 7, []string{"-n", "7"}},
		{"length", text[:1], 1, []string{"-n", "1"}},
		{"length", "", 61, []string{"-n", "61"}}, // to the last position
		{"context", "", 61, []string{"-n", "62"}},
		{"context", "", 61, nil},
		{"stop", text[:end], end + 1, []string{"-stop", text[end : end+1]}},
		{"stop", text[:end], end + 3, []string{"-r", text[end : end+3]}},
		{"stop", text[:end], end + 3, []string{"-stop", "never", "-stop", text[end : end+3], "-stop", text[end:]}},
		{"stop", "", 3, []string{"-stop", text[:3]}},
		{"length", text[:end+2], end + 2, []string{"-stop", text[end : end+3], "-n", "END"}}, // the beginning of a stop text is no stop text
		{"length", text[:9], 9, []string{"-n", "9", "-stop", "never"}},
		{"end", text[:end], end + 1, []string{"-m", eos, "-n", "40"}},
		{"stop", text[:strings.Index(text, text[end-1:end])], strings.Index(text, text[end-1:end]) + 1, []string{"-m", eos, "-stop", text[end-1 : end]}},
	} {
		args := append([]string{"-m", dir, "-p", "abc"}, c.args...)
		for i, arg := range args {
			if arg == "END" {
				args[i] = itoa(end + 2)
			}
		}
		d, _ := generated(t, args...)
		x := d.Texts[0]
		if c.text == "" && c.want != "stop" {
			c.text = x.Text
		}
		if x.Reason != c.want || x.Text != c.text || len(x.Tokens) != c.tokens {
			t.Errorf("%v: %+v, want %+v", c.args, x, c)
		}
		if _, plain, _ := leanlm(t, "", append([]string{"generate", "-exact"}, args...)...); plain != c.text+"\n" {
			t.Errorf("%v wrote %q, want %q", c.args, plain, c.text)
		}
	}
	// Texts stop one by one.
	d, _ = generated(t, "-m", dir, "-p", "abc", "-p", "zz", "-p", strings.Repeat("x", 63), "-n", "40", "-stop", text[end:end+3])
	if x := d.Texts; x[0].Reason != "stop" || x[0].Text != text[:end] || x[2].Reason != "context" || len(x[2].Tokens) != 1 {
		t.Errorf("%+v", x)
	}
	// Of a list of tokens in generation_config.json, each ends the text.
	for _, list := range []string{itoa(4 + int(text[end])), "[2, " + itoa(4+int(text[end])) + "]", "[" + itoa(4+int(text[end])) + ", 2]"} {
		if err := os.WriteFile(filepath.Join(dir, "generation_config.json"), []byte(`{"eos_token_id": `+list+`}`), 0o666); err != nil {
			t.Fatal(err)
		}
		if d, _ := generated(t, "-m", dir, "-p", "abc", "-n", "40"); d.Texts[0].Text != text[:end] || d.Texts[0].Reason != "end" {
			t.Errorf("%s: %+v", list, d.Texts[0])
		}
	}
}

// rewrite changes a file of a folder.
func rewrite(t testing.TB, dir, file string, change func(string) string) {
	t.Helper()
	name := filepath.Join(dir, file)
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	text := change(string(data))
	if text == string(data) {
		t.Fatalf("%s has not changed", file)
	}
	if err := os.WriteFile(name, []byte(text), 0o666); err != nil {
		t.Fatal(err)
	}
}

// TestStopEnd: the token that ends a text may complete a stop text.
func TestStopEnd(t *testing.T) {
	plain, _ := generated(t, "-m", writeModel(t, nil), "-p", "abc", "-n", "40")
	all := plain.Texts[0]
	end := firstNew(all.Text)
	for _, special := range []bool{true, false} {
		dir := writeModel(t, func(c map[string]any) { c["eos_token_id"] = all.Tokens[end] })
		name := all.Text[end : end+1]
		if special { // the letter's token has the name <end>
			rewrite(t, dir, "vocab.json", func(s string) string { return strings.Replace(s, `"`+name+`":`, `"<end>":`, 1) })
			if err := os.WriteFile(filepath.Join(dir, "tokenizer_config.json"), []byte(`{"eos_token": "<end>", "bos_token": "</s>", "unk_token": "</s>", "add_bos_token": true}`), 0o666); err != nil {
				t.Fatal(err)
			}
			name = "<end>"
		}
		for _, c := range []struct{ stop, text, reason string }{
			{"never", all.Text[:end], "end"},
			{all.Text[end-1:end] + name, all.Text[:end-1], "stop"},
			{all.Text[:end] + name, "", "stop"},
			{all.Text[end-1:end] + name + "a", all.Text[:end], "end"},
		} {
			d, _ := generated(t, "-m", dir, "-p", "abc", "-n", "40", "-stop", c.stop, "-logprobs", "1")
			if x := d.Texts[0]; x.Text != c.text || x.Reason != c.reason || len(x.Tokens) != end+1 || len(x.LogProbs) != end+1 {
				t.Errorf("special %v, -stop %q: %+v, want %+v", special, c.stop, x, c)
			}
		}
	}
}

// TestUnkIsOrdinary: a token is not hidden for its name alone.
func TestUnkIsOrdinary(t *testing.T) {
	dir := writeModel(t, nil)
	d, _ := generated(t, "-m", dir, "-p", "abc", "-n", "8")
	all := d.Texts[0]
	if strings.Contains("abc", all.Text[:1]) {
		t.Fatalf("%q begins with a letter of the prompt: another model is needed", all.Text)
	}
	rewrite(t, dir, "vocab.json", func(s string) string {
		s = strings.Replace(s, `"\u003cunk\u003e":`, `"other":`, 1)
		return strings.Replace(s, `"`+all.Text[:1]+`":`, `"<unk>":`, 1)
	})
	if d, _ := generated(t, "-m", dir, "-p", "abc", "-n", "8"); d.Texts[0].Text != strings.ReplaceAll(all.Text, all.Text[:1], "<unk>") {
		t.Errorf("%+v", d.Texts[0])
	}
	if d, _ := generated(t, "-m", dir, "-p", "abc", "-n", "8", "-stop", "<unk>"); d.Texts[0].Text != "" || d.Texts[0].Reason != "stop" {
		t.Errorf("-stop: %+v", d.Texts[0])
	}
}

// writeNamed writes the shipped model, in which the full stop is a special token with a name.
func writeNamed(t testing.TB) string {
	t.Helper()
	dir := writeShipped(t)
	rewrite(t, dir, "vocab.json", func(s string) string {
		var vocabulary map[string]int
		if err := json.Unmarshal([]byte(s), &vocabulary); err != nil {
			t.Fatal(err)
		}
		vocabulary["<|im_end|>"] = vocabulary["."]
		delete(vocabulary, ".")
		data, err := json.Marshal(vocabulary)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	})
	rewrite(t, dir, "merges.txt", func(s string) string {
		var lines []string
		for _, line := range strings.Split(s, "\n") {
			if !strings.Contains(" "+line+" ", " . ") {
				lines = append(lines, line)
			}
		}
		return strings.Join(lines, "\n")
	})
	rewrite(t, dir, "tokenizer_config.json", func(s string) string {
		return strings.Replace(s, "{", `{"additional_special_tokens": ["<|im_end|>"],`, 1)
	})
	return dir
}

// TestStopSpecial: -stop with the name of a special token ends a text where the token comes, though the token has no text.
func TestStopSpecial(t *testing.T) {
	dir := writeNamed(t)
	args := []string{"-m", dir, "-p", "Once upon a time", "-n", "16"}
	d, _ := generated(t, args...)
	all := d.Texts[0]
	if len(all.Tokens) != 16 || all.Tokens[10] != 17 || strings.Contains(all.Text, "im_end") {
		t.Fatalf("without -stop: %+v", all)
	}
	tokens, err := tokenizer.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	text := tokens.Decode(all.Tokens[:10])
	rest := tokens.Decode(all.Tokens[:12])[len(text):]
	for _, c := range []struct {
		stop, text string
		tokens     int // 16: the text goes on to its end
	}{
		{"<|im_end|>", text, 11},
		{text[len(text)-1:] + "<|im_end|>", text[:len(text)-1], 11},
		{text + "<|im_end|>", "", 11},
		{"<|im_end|>" + rest, text, 12},
		{text[len(text)-3:] + "<|im_end|>" + rest[:1], text[:len(text)-3], 12},
		{text[len(text)-3:] + rest[:1], text[:len(text)-3], 12}, // as if the token were not there
		{"im_end", all.Text, 16},
		{"<|im_end|", all.Text, 16},
		{"|im_end|>", all.Text, 16},
		{"</s>", all.Text, 16},
		{"<|im_end|>" + rest + "?", all.Text, 16},
	} {
		d, _ := generated(t, append([]string{"-stop", "never", "-stop", c.stop}, args...)...)
		reason := "stop"
		if c.tokens == 16 {
			reason = "length"
		}
		if x := d.Texts[0]; x.Text != c.text || x.Reason != reason || len(x.Tokens) != c.tokens {
			t.Errorf("-stop %q: %+v, want %+v", c.stop, x, c)
		}
	}
}

// TestCacheOverflow: logits that are no numbers are an error of the text.
func TestCacheOverflow(t *testing.T) {
	dir := writeModel(t, nil)
	rewrite(t, dir, "model.safetensors", func(s string) string {
		data := []byte(s)
		begin := 8 + int(binary.LittleEndian.Uint64(data))
		var header map[string]struct {
			Offsets [2]int `json:"data_offsets"`
		}
		if err := json.Unmarshal(data[8:begin], &header); err != nil {
			t.Fatal(err)
		}
		values := header["decoder.layers.0.self_attn.v_proj.bias"].Offsets
		for at := values[0]; at < values[1]; at += 4 {
			binary.LittleEndian.PutUint32(data[begin+at:], math.Float32bits(1e6)) // more than float16 has
		}
		return string(data)
	})
	for cache, want := range map[string]string{"f16": "after token 4: ", "bf16": "", "f32": "", "e4m3": "", "int8": ""} {
		status, _, errs := leanlm(t, "", "generate", "-m", dir, "-p", "abc", "-n", "3", "-ctk", cache)
		if (status != 0) != (want != "") || !strings.Contains(errs, want) || want != "" && !strings.Contains(errs, "-ctk bf16") {
			t.Errorf("-ctk %s: status %d, %s", cache, status, errs)
		}
	}
}

// harmless reports a character that a terminal would obey.
func harmless(t testing.TB, message string) {
	t.Helper()
	for _, r := range message {
		if unicode.IsControl(r) && !strings.ContainsRune("\n\r\t", r) || r == 0x202e {
			t.Errorf("%U in %q", r, message)
			return
		}
	}
}

// TestPrintable: characters that a terminal obeys are escaped, and nothing else.
func TestPrintable(t *testing.T) {
	for message, want := range map[string]string{
		"plain é \u00a0 世界 🙂\n\tnext": "plain é \u00a0 世界 🙂\n\tnext",
		"\x1b[31m\x07\x7f\r\x00":      `\x1b[31m\a\x7f\r\x00`,
		"\u009b2J \u202e \u200b":      `\u009b2J \u202e \u200b`,
		"\xff\x9b \ufffd":             "\\xff\\x9b \ufffd",
		`"quoted" \ '`:                `"quoted" \ '`,
	} {
		if got := printable(message); got != want {
			t.Errorf("%q: %q, want %q", message, got, want)
		}
	}
}

// TestQuoted: content of a file reaches the terminal escaped, whatever file has it.
func TestQuoted(t *testing.T) {
	const escape = `\u001b[2J\u009b31m`
	for name, text := range map[string]string{
		"model.safetensors.index.json": `{"weight_map": {"x": "` + escape + `.safetensors"}}`,
		"config.json":                  `{"model_type": "` + escape + `"}`,
		"generation_config.json":       `{"` + escape + `": true}`,
		"tokenizer.json":               `{"model": {"type": "` + escape + `"}}`,
		"tokenizer_config.json":        `{"tokenizer_class": "` + escape + `"}`,
		"added_tokens.json":            `{"` + escape + `": 9999}`,
		"special_tokens_map.json":      `{"` + escape + `": "x"}`,
		"adapter_config.json":          `{"peft_type": "` + escape + `"}`,
	} {
		dir := writeModel(t, nil)
		if name == "model.safetensors.index.json" {
			if err := os.Remove(filepath.Join(dir, "model.safetensors")); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
		status, _, errs := leanlm(t, "", "generate", "-m", dir, "-p", "a", "-n", "1")
		harmless(t, errs)
		if status != exitError || !strings.Contains(errs, "[2J") {
			t.Errorf("%s: status %d, %s", name, status, errs)
		}
	}
}

// TestExplain: an error of -m says what the value is, and the way out.
func TestExplain(t *testing.T) {
	dir := writeModel(t, nil)
	t.Chdir(t.TempDir())
	write := func(name, data string) string {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o777), os.WriteFile(name, []byte(data), 0o666)); err != nil {
			t.Fatal(err)
		}
		return name
	}
	up := filepath.Dir
	for _, c := range []struct {
		name string
		want []string
	}{
		{"facebook/opt-125m", []string{"-m facebook/opt-125m is the name of a model", "https://huggingface.co/facebook/opt-125m"}},
		{"none", []string{"none: no such file"}},
		{write("x.gguf", "GGUF\x03\x00\x00\x00"), []string{"x.gguf: the number of tensors"}},
		{write("w.safetensors", "\x08\x00\x00\x00\x00\x00\x00\x00{}      "), []string{"w.safetensors: ", "the file has weights alone, and -m takes a GGUF file, or a folder"}},
		{filepath.Join(dir, "model.safetensors"), []string{"the file has weights alone", "here that is -m " + dir}},
		{filepath.Join(dir, "config.json"), []string{"the file is a JSON file", "here that is -m " + dir}},
		{write("empty", ""), []string{"empty: ", "-m takes a GGUF file, or a folder"}},
		{os.DevNull, []string{"not a regular file", "-m takes a GGUF file or a folder"}},
		{up(write("gpt2/config.json", `{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}`)), []string{`model_type is "gpt2", none of`, `"llama"`}},
		{up(write("ggufs/m\x1b.gguf", "GGUF")), []string{"config.json", `try -m ` + filepath.Join("ggufs", `m\x1b.gguf`)}},
		{up(up(up(write("hub[1]/snapshots/abc/config.json", "{}")))), []string{"the model is at -m " + filepath.Join("hub[1]", "snapshots", "abc")}},
		{up(up(write("parent/opt-125m/config.json", "{}"))), []string{"try -m " + filepath.Join("parent", "opt-125m")}},
		{up(write("broken/config.json", "{")), []string{filepath.Join("broken", "config.json")}},
	} {
		status, out, errs := leanlm(t, "", "generate", "-p", "a", "-m", c.name)
		if status != exitError || out != "" {
			t.Errorf("%s: status %d, %q", c.name, status, out)
		}
		for _, want := range c.want {
			if !strings.Contains(errs, want) {
				t.Errorf("%s: no %q in %s", c.name, want, errs)
			}
		}
		harmless(t, errs)
	}
}

func itoa(n int) string { return strconv.Itoa(n) }
