package gguf

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
)

// TestAdapter checks the pairs of an adapter, with the rows of the Hugging Face model, and the errors of files that are no
// such adapters.
func TestAdapter(t *testing.T) {
	floats := func(n int) (b []byte) {
		for i := range n {
			b = append(b, u32(math.Float32bits(float32(i)))...)
		}
		return b
	}
	good := func() contents {
		return contents{version: 3, keys: []pair{
			{"general.architecture", "llama"}, {"general.type", "adapter"}, {"adapter.type", "lora"}, {"adapter.lora.alpha", float32(8)}, {"adapter.lora.task_name", "x"},
		}, tensors: []written{
			{name: "blk.1.attn_q.weight.lora_a", shape: []uint64{1, 3}, typ: F32, data: floats(3)},
			{name: "blk.1.attn_q.weight.lora_b", shape: []uint64{8, 1}, typ: F32, data: floats(8)},
			{name: "output.weight.lora_b", shape: []uint64{2, 1}, typ: F32, data: floats(2)},
		}}
	}
	f, err := Parse("a.gguf", good().encode())
	if err != nil {
		t.Fatal(err)
	}
	a, err := f.Adapter(2, 1)
	if err != nil {
		t.Fatal(err)
	}
	q, head := a.Pairs["model.layers.1.self_attn.q_proj.weight"], a.Pairs["lm_head.weight"]
	if a.ModelType != "llama" || a.Alpha != 8 || len(a.Pairs) != 2 || q[0] == nil || q[1] == nil || head[0] != nil || head[1] == nil {
		t.Fatalf("%+v", a)
	}
	rows := make([]float32, 8)
	if err := q[1].Float32(rows, 0, 8); err != nil || !slices.Equal(rows, []float32{0, 2, 1, 3, 4, 6, 5, 7}) {
		t.Errorf("rows of two heads: %v, %v", rows, err)
	}
	set := func(key string, value any) func(*contents) {
		return func(c *contents) {
			c.keys = slices.DeleteFunc(c.keys, func(p pair) bool { return p.key == key })
			if value != nil {
				c.keys = append(c.keys, pair{key, value})
			}
		}
	}
	name := func(name string) func(*contents) {
		return func(c *contents) { c.tensors[0].name = name }
	}
	for _, c := range []struct {
		change func(*contents)
		kind   error
		word   string
	}{
		{set("general.type", "model"), ErrUnsupported, "general.type"},
		{set("general.type", nil), ErrUnsupported, "general.type"},
		{set("adapter.type", "control"), ErrUnsupported, "adapter.type"},
		{set("general.architecture", "mamba"), ErrUnsupported, "mamba"},
		{set("general.architecture", nil), ErrMissing, "general.architecture"},
		{set("adapter.lora.alpha", "x"), ErrType, "adapter.lora.alpha"},
		{set("adapter.lora.alpha", math.NaN()), ErrRange, "adapter.lora.alpha"},
		{set("adapter.alora.invocation_tokens", []uint32{1}), ErrUnsupported, "adapter.alora.invocation_tokens"},
		{name("blk.1.attn_norm.weight"), ErrUnsupported, "attn_norm"},
		{name("blk.1.attn_q.weight"), ErrUnsupported, "attn_q.weight"},
		{name("blk.1.attn_x.weight.lora_a"), ErrUnsupported, "attn_x"},
		{name("token_embd.weight.lora_a"), ErrUnsupported, "token_embd"},
		{func(c *contents) { c.tensors[1].shape = []uint64{4, 2} }, nil, ""},
		{func(c *contents) { c.tensors[1].shape = []uint64{2, 4} }, ErrFormat, "2 heads"},
	} {
		file := good()
		c.change(&file)
		f, err := Parse("a.gguf", file.encode())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Adapter(2, 1); !errors.Is(err, c.kind) || err != nil && (!strings.Contains(err.Error(), c.word) || !strings.Contains(err.Error(), "a.gguf")) {
			t.Errorf("%s: %v, want %v", c.word, err, c.kind)
		}
	}
	plain := good()
	set("adapter.lora.alpha", nil)(&plain)
	if f, err = Parse("a.gguf", plain.encode()); err != nil {
		t.Fatal(err)
	}
	if a, err := f.Adapter(2, 1); err != nil || a.Alpha != 0 {
		t.Errorf("without alpha: %+v, %v", a, err)
	}
}
