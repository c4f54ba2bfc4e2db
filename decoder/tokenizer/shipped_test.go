package tokenizer_test

import (
	"encoding/json"
	"os"
	"slices"
	"testing"

	"gorgonia.org/leanattention/decoder/tokenizer"
)

// TestShippedVocabulary: the checkpoint that lies beside the example splits
// texts as transformers' tokenizer does with the same files.
func TestShippedVocabulary(t *testing.T) {
	tokenizer, err := tokenizer.Load("../../examples/opt/tiny")
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile("../../examples/opt/testdata/tokenizer.json")
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
		if ids := tokenizer.EncodeText(g.Text); !slices.Equal(ids, g.IDs) {
			t.Errorf("%q: ids %v, want %v", g.Text, ids, g.IDs)
		}
		if ids := tokenizer.Encode(g.Text); !slices.Equal(ids, append([]int{tokenizer.EOS()}, g.IDs...)) {
			t.Errorf("%q: ids %v do not begin with </s>, or differ", g.Text, ids)
		}
		if text := tokenizer.Decode(g.IDs); text != g.Text {
			t.Errorf("ids of %q say %q", g.Text, text)
		}
	}
}
