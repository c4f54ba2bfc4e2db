package leanattention

import (
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cuda"

	G "gorgonia.org/gorgonia"
)

// PendingLSE is the number of log-sum-exps that an attention node's op keeps.
func PendingLSE(n *G.Node) int {
	s := n.Op().(*attentionOp).lse
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.of)
}

// Slabs is a copy of all memory that c keeps keys and values in.
func Slabs(c *Cache) []byte {
	var all []byte
	c.eachSlab(func(_ cpu.DType, bytes []byte) { all = append(all, bytes...) })
	return all
}

// PoisonFree writes NaN to every slot of the pages that nobody holds.
func PoisonFree(c *Cache) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.eachSlab(func(t cpu.DType, bytes []byte) {
		page := len(bytes) / c.config.Pages
		for _, p := range c.free {
			poison(t, bytes[int(p)*page:(int(p)+1)*page])
		}
	})
}

func (c *Cache) eachSlab(visit func(cpu.DType, []byte)) {
	for i := range c.keys {
		for _, b := range [...]cpu.Buffer{c.keys[i], c.values[i]} {
			visit(b.DType, unsafe.Slice((*byte)(b.Ptr), b.Len*b.DType.Size()))
		}
	}
}

// poison fills memory with the NaN of an element type, little-endian.
func poison(t cpu.DType, bytes []byte) {
	nan := map[cpu.DType][]byte{
		cpu.Float32:  {0, 0, 0xc0, 0x7f},
		cpu.Float16:  {0, 0x7e},
		cpu.BFloat16: {0xc0, 0x7f},
	}[t]
	for i := range bytes {
		bytes[i] = nan[i%len(nan)]
	}
}

// UseDriver takes the CUDA driver from another library until the test ends.
func UseDriver(t testing.TB, path string) {
	loadDriver = func() (*cuda.Driver, error) { return cuda.LoadFrom(path) }
	t.Cleanup(func() { loadDriver = cuda.Load })
}
