package decoder

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"gorgonia.org/leanattention/ranks"
)

// TestPlacement: several GPUs add partial sums if heads and features divide evenly among them, in every rank. A part of features
// begins at a multiple of 16 bytes. Ranks without a part are an error.
func TestPlacement(t *testing.T) {
	network := func(heads, dim, inner int) Network {
		n, err := ReadNetwork(fmt.Appendf(nil, `{"model_type":"opt","vocab_size":61,"hidden_size":%d,"ffn_dim":%d,"num_hidden_layers":1,"num_attention_heads":%d}`, heads*dim, inner, heads), 0)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for _, c := range []struct {
		heads, dim, inner, ranks, gpus int
		context, want                  bool
	}{
		{32, 128, 16384, 0, 8, false, true},
		{32, 128, 16384, 2, 4, false, true},
		{32, 128, 16384, 0, 1, false, false}, // nothing to add
		{32, 128, 16384, 2, 9, false, false}, // too many GPUs
		{36, 128, 18432, 1, 9, false, false},
		{6, 64, 1024, 4, 4, true, true},   // ranks of one head and of two
		{6, 64, 1024, 4, 4, false, false}, // a head has no half
		{6, 64, 1024, 4, 8, true, true},
		{6, 32, 1024, 4, 8, true, false}, // 4 of the 32 features of a rank's head are 8 bytes
		{3, 64, 48, 1, 3, false, true},
		{4, 64, 96, 2, 3, false, false}, // 2 heads
		{6, 64, 96, 2, 3, false, true},
		{6, 64, 112, 2, 3, false, false}, // 48 and 64 inner features
	} {
		for rank := range max(c.ranks, 1) { // all ranks have one answer
			p := placement{world: ranks.World{Size: c.ranks, Rank: rank}, context: c.context}
			if got, err := p.checkOf(network(c.heads, c.dim, c.inner), c.gpus); got != c.want || err != nil {
				t.Errorf("%+v: %v, %v", c, got, err)
			}
		}
	}
	p := placement{world: ranks.World{Size: 3}}
	if _, err := p.checkOf(network(2, 64, 1024), 1); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "has 2 parts, and there are 3 ranks") {
		t.Errorf("%v", err)
	}
	if _, err := p.checkOf(&sinksLayer{Width: 8, Heads: 2, KVHeads: 2, Dim: 8}, 1); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "no weights to split") {
		t.Errorf("%v", err)
	}
}
