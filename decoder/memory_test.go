package decoder

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/memory"

	la "gorgonia.org/leanattention"

	"gorgonia.org/tensor"
)

// TestCheckMemory: the weights must fit the memory, to the byte.
func TestCheckMemory(t *testing.T) {
	var free int64
	defer memory.Replace(func() (memory.Free, bool) { return memory.Free{Bytes: free, Total: 1 << 40, Of: "a test"}, true })()
	n, err := ReadNetwork([]byte(`{"model_type":"opt","vocab_size":10,"hidden_size":4,"ffn_dim":8,"num_hidden_layers":1,"num_attention_heads":1,"max_position_embeddings":6}`), 0)
	if err != nil {
		t.Fatal(err)
	}
	const matrices, vectors = 10*4 + 8*4 + 4*4*4 + 2*4*8, 4*4 + 8 + 4 + 6*4
	for _, as := range []tensor.Dtype{{}, tensor.Float32, la.BFloat16} {
		bytes, o := int64(2), &Options{Weights: as}
		if as == tensor.Float32 {
			bytes = 4
		}
		if free = bytes*matrices + 4*vectors; o.checkMemory(n, nil) != nil {
			t.Errorf("of %d bytes: %v", bytes, o.checkMemory(n, nil))
		}
		free--
		if err := o.checkMemory(n, nil); !errors.Is(err, la.ErrOutOfMemory) || !strings.Contains(err.Error(), fmt.Sprintf("at least %d bytes", free+1)) || !strings.Contains(err.Error(), fmt.Sprintf("%d of %d bytes of a test", free, int64(1<<40))) {
			t.Errorf("of %d bytes: %v", bytes, err)
		}
	}
	defer memory.Replace(func() (memory.Free, bool) { return memory.Free{}, false })()
	if err := new(Options).checkMemory(n, nil); err != nil {
		t.Errorf("a system that does not tell: %v", err)
	}
}
