package tokenizer_test

import (
	"encoding/json"
	"os"
	"slices"
	"testing"

	"gorgonia.org/leanattention/decoder/tokenizer"
)

// TestShippedVocabulary checks that the tokenizer of the example's checkpoint gives
// the ids of transformers with the same files.
func TestShippedVocabulary(t *testing.T) {
	tokens, err := tokenizer.Load("../../examples/opt/tiny")
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile("testdata/shipped.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden []struct {
		Text string
		IDs  []int
	}
	if err := json.Unmarshal(data, &golden); err != nil {
		t.Fatal(err)
	}
	if len(golden) < 20 {
		t.Fatalf("%d golden texts", len(golden))
	}
	for _, g := range golden {
		if ids := encode(t, tokens, g.Text, tokenizer.Options{Bare: true}); !slices.Equal(ids, g.IDs) {
			t.Errorf("%q: ids %v, want %v", g.Text, ids, g.IDs)
		}
		if ids := encode(t, tokens, g.Text, tokenizer.Options{}); !slices.Equal(ids, append([]int{tokens.EOS()}, g.IDs...)) {
			t.Errorf("%q: ids %v do not begin with </s>, or differ", g.Text, ids)
		}
		if text := tokens.Decode(g.IDs); text != g.Text {
			t.Errorf("ids of %q say %q", g.Text, text)
		}
	}
}

// encode calls Encode for a text whose characters all have tokens.
func encode(t *testing.T, tokens *tokenizer.Tokenizer, text string, o tokenizer.Options) []int {
	t.Helper()
	ids, err := tokens.Encode(text, o)
	if err != nil {
		t.Fatal(err)
	}
	return ids
}
