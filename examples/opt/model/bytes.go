package model

import (
	"fmt"
	"slices"
	"time"

	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/dense"

	"gorgonia.org/tensor"
)

// stepBytes returns the bytes of weights that a run reads: all but the tables of which it takes rows.
func (w *Weights) stepBytes() int64 {
	n := w.Bytes()
	for _, table := range w.tables() {
		n -= int64(w.tensors[table].MemSize())
	}
	return n
}

// tables returns the weights of which a run reads only some rows. The table of tokens is read whole if the head uses
// it too.
func (w *Weights) tables() []string {
	names := []string{"decoder.embed_positions.weight"}
	if !w.config.TieWordEmbeddings {
		names = append(names, "decoder.embed_tokens.weight")
	}
	return names
}

// tokenBytes returns the bytes that attention reads for each visible token.
func tokenBytes(c hf.Config, storage tensor.Dtype) int64 {
	if storage == (tensor.Dtype{}) {
		storage = tensor.Float32
	}
	return 2 * int64(c.Layers) * int64(c.HiddenSize) * int64(storage.Size())
}

// runBytes returns the bytes that the next run of a pass reads: the weights, and the keys and values of the visible
// tokens, new ones included. It is 0 for [Fused], which stores none.
func (d *Decoder) runBytes(p *pass) int64 {
	if d.options.Attention == Fused {
		return 0
	}
	n := d.stepBytes
	from, to := d.options.world().Part(d.config.Heads)
	for i, count := range p.counts {
		if count > 0 {
			n += int64(d.lengths[i]+count) * tokenBytes(d.config, d.options.Cache) * int64(to-from) / int64(d.config.Heads)
		}
	}
	return n
}

// readWhole returns the memory of the weights that a run reads whole, each from the first 64-bit word on.
func (w *Weights) readWhole() (all [][]byte) {
	tables := w.tables()
	for name, t := range w.tensors {
		if !slices.Contains(tables, name) {
			b := dense.Backing[byte](t)
			all = append(all, b[min(-t.Uintptr()%8, uintptr(len(b))):])
		}
	}
	return all
}

// ReadCeiling returns the bandwidth of the weights' memory. On the CPU it is measured by adding up the bytes of a run
// on all cores, which takes the time of a few runs. On a GPU it follows from the clock and the width of the memory;
// for several GPUs it is the sum, and 0 if the driver does not return them.
func (d *Decoder) ReadCeiling() (bytesPerSecond float64, err error) {
	if d.options.Device != nil {
		for _, m := range d.options.Device.Members() {
			if m.MemoryBandwidth == 0 {
				return 0, nil
			}
			bytesPerSecond += m.MemoryBandwidth
		}
		return bytesPerSecond, nil
	}
	// As many bytes as a run of decode: of more bytes a smaller share would be in caches, of fewer a larger one.
	all, bytes := d.weights.readWhole(), int64(0)
	for _, b := range all {
		bytes += int64(len(b))
	}
	if p := d.Stats().Decode; p.Passes > 0 {
		if seen := min(p.Bytes/int64(p.Passes)-d.stepBytes, ceilingKeys); seen > 0 {
			all, bytes = append(all, touched(int(seen))), bytes+seen
		}
	}
	// Threads may sleep in the first turns, and other programs may disturb others: the best of many counts.
	for turn, began := 0, time.Now(); turn < 5 || time.Since(began) < ceilingTime || turn < 20 && time.Since(began) < 5*ceilingTime; turn++ {
		turnBegan := time.Now()
		if _, err := cpu.ReadSum(cpu.Default(), all...); err != nil {
			return 0, fmt.Errorf("model: %w", err)
		}
		bytesPerSecond = max(bytesPerSecond, float64(bytes)/time.Since(turnBegan).Seconds())
	}
	return bytesPerSecond, nil
}

const (
	// ceilingTime is the least time of the measurement.
	ceilingTime = 200 * time.Millisecond

	// ceilingKeys is the largest number of bytes that are read in place of keys and values, whose memory can't be
	// added up: more is in no cache anyway.
	ceilingKeys = 256 << 20
)

// touched returns memory that has been written: unwritten memory is one page of zeros, which caches hold.
func touched(bytes int) []byte {
	b := make([]byte, (bytes+7)/8*8)
	for i := 0; i < len(b); i += 4096 {
		b[i] = 1
	}
	return b
}
