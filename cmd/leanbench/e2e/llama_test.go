package e2e

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/examples/llama"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// smallLlama is of a shape that is made and run in no time.
func smallLlama(t *testing.T, tied bool) llama.Config {
	t.Helper()
	fields := newLlama("", 2, 64, 96, 16, tied, map[string]any{"rope_type": "default", "rope_theta": 1e4}).fields
	for name, n := range map[string]int{"vocab_size": 300, "num_attention_heads": 4, "num_key_value_heads": 2} {
		fields[name] = n
	}
	data, err := json.Marshal(fields)
	if err != nil {
		t.Fatal(err)
	}
	c, err := llama.ReadConfig(data)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestLlamaShapes: the sizes that the models are called by, and what a step of them reads.
func TestLlamaShapes(t *testing.T) {
	for name, want := range map[string]struct{ all, read, token float64 }{
		"llama-3.2-1b": {1.236e9, 1.236e9, 2 * 16 * 8 * 64},
		"llama-3-8b":   {8.030e9, 7.505e9, 2 * 32 * 8 * 128}, // without the table of tokens
	} {
		s, err := shapeNamed(name, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		c := s.(llamaModel).config
		if n := float64(llamaBytes(&c, 2, true)) / 2; math.Abs(n/want.all-1) > 1e-3 {
			t.Errorf("%v has %v weights, want %v", s, n, want.all)
		}
		weights, token := s.bytes(measure.StoreF16)
		if n := float64(weights) / 2; math.Abs(n/want.read-1) > 1e-3 || float64(token) != 2*want.token {
			t.Errorf("a step of %v reads %v weights and %d bytes a token, want %v and %v", s, n, token, want.read, 2*want.token)
		}
		if strings.ToLower(s.String()) != name {
			t.Errorf("%s is called %v", name, s)
		}
	}
	all, err := gpuCasesOf(t, "-shapes=llama-3.2-1b,llama-3-8b")
	var got []string
	for _, c := range all {
		least := 0.0
		if c.share != nil {
			least = *c.share.Least
		}
		got = append(got, fmt.Sprintf("%v %v %v %v %d", c.table(), c, least, c.peers, len(c.others)))
		if c.compiled != nil {
			t.Errorf("%v, %v has to be %v times as fast", c.shape, c, *c.compiled.Least)
		}
	}
	want := []string{
		"A decode step of Llama-3.2-1B in float16 b1, behind 1024 tokens 0.8 true 0", "A decode step of Llama-3.2-1B in float16 b16, behind 1024 tokens 0 true 0",
		"A decode step of Llama-3-8B in float16 b1, behind 1024 tokens 0.92 true 0", "A decode step of Llama-3-8B in float16 b16, behind 1024 tokens 0.85 true 0",
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("cases\n%s\nwant\n%s\n%v", strings.Join(got, "\n"), strings.Join(want, "\n"), err)
	}
}

// TestLeanLlama: the decoder that is measured does its work, on the CPU here, and a turn does not depend on the one
// before.
func TestLeanLlama(t *testing.T) {
	for _, tied := range []bool{false, true} {
		e := newLeanLlama(smallLlama(t, tied), nil, 5)
		if err := e.check(); err != nil {
			t.Error(err)
		}
		texts := map[string]string{}
		for _, c := range [][3]int{{1, 12, 4}, {2, 12, 6}, {2, 12, 6}, {2, 12, 3}, {6, 12, 6}, {2, 7, 2}, {1, 12, 4}} {
			prompt, steady, ids, err := e.decode(c[0], c[1], c[2])
			if err != nil || prompt <= 0 || steady <= 0 || len(ids) != 1+c[2] {
				t.Fatalf("%v: %v, %v, %d tokens (%v)", c, prompt, steady, len(ids), err)
			}
			key, text := fmt.Sprint(c[1]), strings.Join(ids, " ")
			if before, ok := texts[key]; ok && !strings.HasPrefix(text, before) && !strings.HasPrefix(before, text) {
				t.Errorf("%v: tokens %s, and %s before", c, text, before)
			}
			texts[key] = text
		}
		e.size--
		if err := e.check(); err == nil || !strings.Contains(err.Error(), "bytes of weights") {
			t.Errorf("a byte less: %v", err)
		}
		if err := e.close(); err != nil {
			t.Error(err)
		}
	}
}
