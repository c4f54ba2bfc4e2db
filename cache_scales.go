package leanattention

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/kvstore"
	"gorgonia.org/leanattention/internal/operand"
)

// Scales says which elements of a cache of [E4M3] or int8 share a float32 scale: an element x with the scale s stands for x*s.
// Elements beyond the largest number, 448 or 127, become the largest number.
type Scales uint8

const (
	// ScalesByToken: a key of a KV head has a scale, and so has a value. The scale makes the row's largest element the largest number.
	// With ValuesInKeys, each 128 elements of a value have a scale, the rest of the key is stored as [BFloat16], DType is E4M3, and
	// ValueDim is a multiple of 128. A latent vector of 512 + 64 elements takes 656 bytes.
	ScalesByToken Scales = iota

	// ScalesByHead: all keys of a KV head of a layer have a scale, and so have its values: KeyScales and ValueScales of
	// [CacheConfig].
	ScalesByHead

	// ScalesByPage: the keys of a KV head in a page have a scale, and so have the values. The first token of a page sets the scale: its
	// largest element becomes 28 in E4M3 and 31.75 in int8. Elements of later tokens may be 16 times as large in E4M3, and 4 times in
	// int8; larger elements saturate. No element is rounded twice, so no token moves: [Append.Parents], and a [Sequence.Keep] that
	// moves tokens, are [ErrUnsupported]. Saved sequences are for caches of the same PageSize.
	ScalesByPage
)

// String returns the name of the constant.
func (s Scales) String() string {
	if names := [...]string{"ScalesByToken", "ScalesByHead", "ScalesByPage"}; int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("Scales(%d)", uint8(s))
}

// scales returns which elements share a scale.
func (c *CacheConfig) scales() attn.Scales {
	if !kvstore.HasScales(c.DType) {
		return attn.NoScales
	}
	return map[Scales]attn.Scales{ScalesByToken: attn.ScalesByToken, ScalesByHead: attn.ScalesByHead, ScalesByPage: attn.ScalesByPage}[c.Scales]
}

// format returns the format of a page of a layer, and whether there are caches of the DType.
func (c *CacheConfig) format(layer int) (attn.Format, bool) {
	t, scales := c.DType, c.scales()
	if layer < c.EdgeLayers || layer >= c.Layers-c.EdgeLayers {
		t, scales = BFloat16, attn.NoScales
	}
	return kvstore.FormatOf(t, scales, c.HeadDim, c.ValueDim, c.KVHeads, c.PageSize, c.ValuesInKeys)
}

// checkScales checks the settings of scales.
func (c *CacheConfig) checkScales(op string) error {
	const group = kvstore.LatentGroup
	switch has := kvstore.HasScales(c.DType); {
	case c.EdgeLayers < 0 || c.EdgeLayers > 0 && 2*c.EdgeLayers >= c.Layers || c.EdgeLayers >= 1<<24:
		return errs.Errorf(op, ErrShape, "EdgeLayers is %d, and Layers %d: at least one layer must be between first and last ones", c.EdgeLayers, c.Layers)
	case c.EdgeLayers > 0 && !has && c.DType != Q4:
		return errs.Errorf(op, ErrOption, "EdgeLayers is %d, and a cache of %v has 16 bits and more in all layers: set DType to E4M3, int8 or Q4, or leave EdgeLayers out", c.EdgeLayers, c.DType)
	case c.DType == Q4 && c.ValuesInKeys:
		return errs.Errorf(op, ErrUnsupported, "DType is %v with ValuesInKeys; it must be float32, Float16, BFloat16 or E4M3", c.DType)
	case c.DType == Q4 && (c.HeadDim%half.Q4Columns != 0 || c.ValueDim%half.Q4Columns != 0):
		return errs.Errorf(op, ErrUnsupported, "HeadDim is %d and ValueDim %d; with %v both must be multiples of %d, the columns of a scale", c.HeadDim, c.ValueDim, c.DType, half.Q4Columns)
	case c.Scales > ScalesByPage:
		return errs.Errorf(op, ErrOption, "Scales is %v, none of ScalesByToken, ScalesByHead and ScalesByPage", c.Scales)
	case c.Scales != 0 && !has:
		return errs.Errorf(op, ErrOption, "Scales is %v, and a cache of %v has no Scales: set DType to E4M3 or int8, or leave Scales out", c.Scales, c.DType)
	case !has || !c.ValuesInKeys:
	case c.DType != E4M3:
		return errs.Errorf(op, ErrUnsupported, "DType is %v with ValuesInKeys; it must be float32, Float16, BFloat16 or E4M3", c.DType)
	case c.Scales != 0:
		return errs.Errorf(op, ErrUnsupported, "Scales is %v with ValuesInKeys, where each %d elements have a scale: leave Scales out", c.Scales, group)
	case c.ValueDim%group != 0:
		return errs.Errorf(op, ErrUnsupported, "ValueDim is %d with ValuesInKeys and E4M3; it must be a multiple of %d, the columns of a scale", c.ValueDim, group)
	}
	for _, x := range c.headScales() {
		if x.scales == nil {
			continue
		}
		if c.Scales != ScalesByHead {
			return errs.Errorf(op, ErrOption, "%s is set, and Scales is %v: set Scales to ScalesByHead, or leave %s out", x.name, c.Scales, x.name)
		}
		if n := attn.Product(c.Layers, c.KVHeads); len(x.scales) != n {
			return errs.Errorf(op, ErrShape, "%s has %d scales; one for each of %d layers x %d KV heads is %d", x.name, len(x.scales), c.Layers, c.KVHeads, n)
		}
		if i := slices.IndexFunc(x.scales, func(s float32) bool { return !(s > 0 && s <= math.MaxFloat32) }); i >= 0 {
			return errs.Errorf(op, ErrOption, "%s[%d] is %v; it must be positive and finite", x.name, i, x.scales[i])
		}
	}
	return nil
}

type headScales struct {
	name   string
	scales []float32
}

func (c *CacheConfig) headScales() [2]headScales {
	return [2]headScales{{"KeyScales", c.KeyScales}, {"ValueScales", c.ValueScales}}
}

// savedScales returns what a saved sequence has of the scales behind its header: the tokens of a page, or the scales of heads.
func (c *CacheConfig) savedScales() (b []byte) {
	switch c.scales() {
	case attn.ScalesByPage:
		b = binary.LittleEndian.AppendUint32(b, uint32(c.PageSize))
	case attn.ScalesByHead:
		for _, x := range c.headScales() {
			for i := range c.Layers * c.KVHeads {
				b = binary.LittleEndian.AppendUint32(b, math.Float32bits(kvstore.HeadScale(x.scales, i)))
			}
		}
	}
	return b
}

// readScales reads what savedScales returns, and compares it with the scales of c.
func (c *CacheConfig) readScales(in *operand.SumReader) error {
	for i, want := 0, c.savedScales(); i < len(want); i += 4 {
		var b [4]byte
		if err := in.Read(b[:]); err != nil {
			return err
		}
		got, have := binary.LittleEndian.Uint32(b[:]), binary.LittleEndian.Uint32(want[i:])
		if got == have {
			continue
		}
		if c.Scales == ScalesByPage {
			return errs.Errorf(in.Op, ErrShape, "PageSize is %d in the saved sequence and %d in the cache, and pages have scales", got, have)
		}
		x, at := c.headScales(), i/4
		name := x[at/(len(want)/8)].name
		return errs.Errorf(in.Op, ErrShape, "%s[%d] is %v in the saved sequence and %v in the cache", name, at%(len(want)/8), math.Float32frombits(got), math.Float32frombits(have))
	}
	return nil
}
