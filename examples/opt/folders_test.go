package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/examples/opt/files"
	"gorgonia.org/leanattention/examples/opt/tiny"
)

// TestEndsOfText: a text ends at any of the tokens that generation_config.json
// names.
func TestEndsOfText(t *testing.T) {
	dir := writeModel(t, nil)
	_, all, _ := command(t, "-model", dir, "-prompt", "abc", "-n", "40")
	end := 1
	for strings.IndexByte(all, all[end]) < end {
		end++ // to the first letter that is not there before
	}
	for _, ids := range []string{fmt.Sprint(4 + int(all[end])), fmt.Sprintf("[2, %d]", 4+int(all[end])), fmt.Sprintf("[%d, 2]", 4+int(all[end]))} {
		if err := os.WriteFile(filepath.Join(dir, "generation_config.json"), []byte(`{"eos_token_id": `+ids+`}`), 0o666); err != nil {
			t.Fatal(err)
		}
		status, out, log := command(t, "-model", dir, "-prompt", "abc", "-n", "40")
		if want := all[:end] + "\n"; status != 0 || out != want {
			t.Errorf("the end of %q is %s: status %d, %q, want %q; %s", all, ids, status, out, want, log)
		}
	}
}

// TestSavedToday: a folder as transformers saves it today, without vocab.json and
// merges.txt, gives the text that it gives in the other form.
func TestSavedToday(t *testing.T) {
	dir := writeModel(t, nil)
	_, want, _ := command(t, "-model", dir, "-prompt", "abc", "-n", "20")
	var vocab map[string]int
	data, err := os.ReadFile(filepath.Join(dir, "vocab.json"))
	if err == nil {
		err = json.Unmarshal(data, &vocab)
	}
	if err != nil {
		t.Fatal(err)
	}
	level := map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}
	data, err = json.Marshal(map[string]any{
		"version": "1.0", "truncation": nil, "padding": nil, "normalizer": nil, "pre_tokenizer": level, "decoder": level,
		"added_tokens": []any{map[string]any{"id": 2, "content": "</s>", "special": true}},
		"post_processor": map[string]any{"type": "TemplateProcessing", "pair": []any{},
			"single":         []any{map[string]any{"SpecialToken": map[string]any{"id": "</s>", "type_id": 0}}, map[string]any{"Sequence": map[string]any{"id": "A", "type_id": 0}}},
			"special_tokens": map[string]any{"</s>": map[string]any{"id": "</s>", "ids": []int{2}, "tokens": []string{"</s>"}}}},
		"model": map[string]any{"type": "BPE", "vocab": vocab, "merges": []any{}},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{
		os.WriteFile(filepath.Join(dir, "tokenizer.json"), data, 0o666),
		os.Remove(filepath.Join(dir, "vocab.json")), os.Remove(filepath.Join(dir, "merges.txt")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if status, out, log := command(t, "-model", dir, "-prompt", "abc", "-n", "20"); status != 0 || out != want {
		t.Errorf("status %d, %q, want %q; %s", status, out, want, log)
	}
}

// TestNoRoom: more prompts than the machine has memory for are an error, before
// anything is made for them.
func TestNoRoom(t *testing.T) {
	name := filepath.Join(t.TempDir(), "prompts")
	if err := os.WriteFile(name, bytes.Repeat([]byte("a\n"), 200_000), 0o666); err != nil {
		t.Fatal(err)
	}
	o, err := parsed([]string{"-prompts", name, "-n", "2000"})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := generate(context.Background(), o, &out, io.Discard); !errors.Is(err, la.ErrOutOfMemory) || !strings.Contains(err.Error(), "MB of cache") || out.Len() > 0 {
		t.Errorf("%v, %q", err, out.String())
	}
}

// TestLongWord: a prompt that is one long word is found too long at once.
func TestLongWord(t *testing.T) {
	o, err := parsed([]string{"-prompt", strings.Repeat("a", 50<<20)})
	if err != nil {
		t.Fatal(err)
	}
	if err := generate(context.Background(), o, io.Discard, io.Discard); err == nil || !strings.Contains(err.Error(), "prompt 1 has more than 32768 tokens, and the model has 2048 positions: shorten it") {
		t.Errorf("%v", err)
	}
	huge := filepath.Join(t.TempDir(), "prompts")
	f, err := os.Create(huge)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Truncate(maxPrompts+1), f.Close()); err != nil {
		t.Skip(err)
	}
	if _, err := parsed([]string{"-prompts", huge}); err == nil || !strings.Contains(err.Error(), files.ErrTooLong.Error()) {
		t.Errorf("a file of %d bytes: %v", maxPrompts+1, err)
	}
}

// TestCacheOverflow: where numbers may have been too large for the cache, the error
// names its type and what to do.
func TestCacheOverflow(t *testing.T) {
	dir := writeModel(t, nil)
	name := filepath.Join(dir, "model.safetensors")
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	begin := 8 + int(binary.LittleEndian.Uint64(data))
	var header map[string]struct {
		Offsets [2]int `json:"data_offsets"`
	}
	if err := json.Unmarshal(data[8:begin], &header); err != nil {
		t.Fatal(err)
	}
	values := header["decoder.layers.0.self_attn.v_proj.bias"].Offsets
	for at := values[0]; at < values[1]; at += 4 {
		binary.LittleEndian.PutUint32(data[begin+at:], math.Float32bits(1e6))
	}
	if err := os.WriteFile(name, data, 0o666); err != nil || values[0] == values[1] {
		t.Fatal(err, header)
	}
	for cache, word := range map[string]string{"f16": "-cache bf16", "bf16": "", "f32": ""} {
		status, _, log := command(t, "-model", dir, "-prompt", "abc", "-n", "3", "-cache", cache)
		if (status != 0) != (word != "") || !strings.Contains(log, word) {
			t.Errorf("-cache %s: status %d, %s", cache, status, log)
		}
	}
}

// TestShippedSettings: the program's own folder has the files that say how texts
// begin, and its tokenizer goes by them.
func TestShippedSettings(t *testing.T) {
	tokens, err := tokenizer.LoadFS("x", tiny.Files)
	if err != nil {
		t.Fatal(err)
	}
	if ids, err := tokens.Encode("a</s>", tokenizer.Options{Special: true}); err != nil || len(ids) != 3 || ids[0] != 2 || ids[2] != 2 {
		t.Errorf("ids %v", ids)
	}
}

// parsed is parse, and the prompts read.
func parsed(args []string) (options, error) {
	o, err := parse(args, io.Discard)
	if err == nil {
		err = o.readPrompts(nil)
	}
	return o, err
}
