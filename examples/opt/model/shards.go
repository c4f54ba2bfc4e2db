package model

import (
	"fmt"
	"iter"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/ranks"

	la "gorgonia.org/leanattention"

	"gorgonia.org/tensor"
)

// The parts of a model on several GPUs. If features divide evenly, each GPU has some rows of the queries', keys' and
// values' weights, and columns of the layer after attention; of the feed-forward network its rows of the first layer
// and columns of the second; and all tables, norms and biases. So all GPUs compute all of the step, with two sums a
// layer. The rows are those of a GPU's heads. If instead each GPU has keys and values of all heads for a part of the
// context, the GPUs gather the rows before attention and merge after it. If features do not divide evenly, each GPU
// has a part of the output features of each linear layer, and the first GPU has the rest of the model.

const (
	tokenTable = "decoder.embed_tokens.weight"
	headWeight = "lm_head.weight"
)

// placement says which GPUs have a weight.
type placement int

const (
	onFirst   placement = iota
	onAll               // each GPU has all of it
	byRows              // each GPU has some rows
	byColumns           // each GPU has some columns
)

// placed is a weight in the memory of GPUs.
type placed struct {
	name  string
	from  string // name of the weight in the source
	shape []int
	at    placement
}

// placing returns the placement of each weight on the given number of GPUs. The head is sharded even if it is also
// the table of tokens.
func placing(c hf.Config, world ranks.World, gpus int) iter.Seq[placed] {
	return func(yield func(placed) bool) {
		var table placed
		for w := range c.Weights() {
			p := placed{w.Name, w.Name, w.Shape, placementOf(&c, world, w.Name, gpus)}
			if p.name == tokenTable {
				table = p
			}
			if !yield(p) {
				return
			}
		}
		if gpus > 1 && c.TieWordEmbeddings {
			yield(placed{headWeight, table.from, table.shape, byRows})
		}
	}
}

// evenly reports whether each GPU of each rank can have equally many outer and inner features, in rows that GPUs can
// read. All ranks must agree.
func evenly(c *hf.Config, world ranks.World, gpus int) bool {
	const most = 8 // largest number of GPUs that sum
	if gpus > most {
		return false
	}
	world.Size = max(world.Size, 1)
	for world.Rank = range world.Size {
		outer, outerEnd := world.Part(c.Heads)
		inner, innerEnd := features(*c, world)
		if (outerEnd-outer)*c.HeadDim()%(featureBlock*gpus) != 0 || (innerEnd-inner)%(featureBlock*gpus) != 0 {
			return false
		}
	}
	return true
}

func placementOf(c *hf.Config, world ranks.World, name string, gpus int) placement {
	if gpus == 1 {
		return onFirst
	}
	dir, kind, _ := cutLast(name, ".")
	_, layer, _ := cutLast(dir, ".")
	if !evenly(c, world, gpus) {
		switch layer {
		case "q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "project_in", "project_out", "lm_head":
			return byRows
		}
		return onFirst
	}
	if kind == "weight" {
		switch layer {
		case "q_proj", "k_proj", "v_proj", "fc1", "lm_head":
			return byRows
		case "out_proj", "fc2":
			return byColumns
		}
	}
	return onAll
}

// bytesOn returns the bytes of a weight on one of some GPUs, for an element size.
func (p *placed) bytesOn(gpu, gpus int, size uintptr) int64 {
	n := int64(size)
	for axis, s := range p.shape {
		if p.at == byRows && axis == 0 || p.at == byColumns && axis == 1 {
			s = (gpu+1)*s/gpus - gpu*s/gpus
		}
		n *= int64(s)
	}
	if p.at == onFirst && gpu > 0 {
		return 0
	}
	return n
}

// checkFree checks that each GPU has memory for its needs; what names the parts of the need.
func checkFree(gpu *device.GPU, need func(member int) (bytes int64, what string)) error {
	for i := range gpu.Members() {
		m, err := gpu.Memory(i)
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

// bytesOn returns the bytes of the weights on one of some GPUs.
func (w *Weights) bytesOn(gpu, gpus int) (n int64) {
	for p := range placing(w.config, w.world, gpus) {
		if t := w.tensors[p.from]; t != nil { // nil: another rank's weight
			p.shape = t.Shape()
			n += p.bytesOn(gpu, gpus, t.Dtype().Size())
		}
	}
	return n
}

// place copies a weight to GPUs.
func (w *Weights) place(gpu *device.GPU, p *placed) (t *device.Tensor, err error) {
	var from tensor.Tensor = w.tensors[p.from]
	switch p.at {
	case onAll:
		t, err = gpu.UploadReplicated(from)
	case byRows:
		t, err = gpu.UploadSharded(from, 0)
	case byColumns:
		t, err = gpu.UploadSharded(from, 1)
	default:
		t, err = gpu.Upload(from)
	}
	if err != nil {
		return nil, fmt.Errorf("model: weight %s: %w", p.name, err)
	}
	return t, nil
}
