package model

import (
	"fmt"
	"iter"
	"strings"

	"gorgonia.org/leanattention/examples/opt/hf"

	la "gorgonia.org/leanattention"

	"gorgonia.org/tensor"
)

// What is where on several GPUs: those of one linear layer have a part of its output features each, and the first
// one has the rest of the model.

const (
	tokenTable = "decoder.embed_tokens.weight"
	headWeight = "lm_head.weight"
)

// placed is a weight in the memory of GPUs.
type placed struct {
	name    string
	from    string // the weight in the source that it is
	shape   []int
	sharded bool // over all GPUs, by its first axis; else it is on the first
}

// placing is where each weight goes on so many GPUs. Tokens are looked up on the first one, and the head is dealt
// out: where both are one weight, the first GPU has all of it for the one, and each its part for the other.
func placing(c hf.Config, gpus int) iter.Seq[placed] {
	return func(yield func(placed) bool) {
		var table placed
		for w := range c.Weights() {
			p := placed{w.Name, w.Name, w.Shape, gpus > 1 && isLinear(w.Name)}
			if p.name == tokenTable {
				table = p
			}
			if !yield(p) {
				return
			}
		}
		if gpus > 1 && c.TieWordEmbeddings {
			yield(placed{headWeight, table.from, table.shape, true})
		}
	}
}

// isLinear says whether a weight is one of a linear layer.
func isLinear(name string) bool {
	layer := name[:strings.LastIndex(name, ".")]
	for _, l := range []string{"_proj", ".fc1", ".fc2", ".project_in", ".project_out", "lm_head"} {
		if strings.HasSuffix(layer, l) {
			return true
		}
	}
	return false
}

// bytesOn is what one of some GPUs has of a weight with elements of a size.
func (p *placed) bytesOn(gpu, gpus int, size uintptr) int64 {
	rows := p.shape[0]
	switch {
	case p.sharded:
		rows = (gpu+1)*rows/gpus - gpu*rows/gpus
	case gpu > 0:
		return 0
	}
	n := int64(rows) * int64(size)
	for _, s := range p.shape[1:] {
		n *= int64(s)
	}
	return n
}

// checkFree says whether each GPU has room for what it needs, what being the parts of that.
func checkFree(gpu *la.GPU, need func(member int) (bytes int64, what string)) error {
	for i := range gpu.Members() {
		m, err := gpu.MemoryOf(i)
		if err != nil {
			return err
		}
		bytes, what := need(i)
		if bytes <= m.Free {
			continue
		}
		at := gpu.String()
		if len(gpu.Members()) > 1 {
			info := gpu.Members()[i]
			at = fmt.Sprintf("GPU %d (%s)", info.Ordinal, info.Name)
		}
		return fmt.Errorf("model: %s on %s, which has %d of %d MB free: %w", what, at, m.Free>>20, m.Total>>20, la.ErrOutOfMemory)
	}
	return nil
}

// bytesOn is what one of some GPUs has of the weights.
func (w *Weights) bytesOn(gpu, gpus int) (n int64) {
	for p := range placing(w.config, gpus) {
		if t := w.tensors[p.from]; t != nil { // else another rank's
			p.shape = t.Shape()
			n += p.bytesOn(gpu, gpus, t.Dtype().Size())
		}
	}
	return n
}

// place copies a weight to GPUs.
func (w *Weights) place(gpu *la.GPU, p *placed) (t *la.DeviceTensor, err error) {
	var from tensor.Tensor = w.tensors[p.from]
	if p.sharded {
		t, err = gpu.UploadSharded(from, 0)
	} else {
		t, err = gpu.Upload(from)
	}
	if err != nil {
		return nil, fmt.Errorf("model: weight %s: %w", p.name, err)
	}
	return t, nil
}
