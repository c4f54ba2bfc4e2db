package layers

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/weight"
)

// Weights of 8 and 4 bits in a [Megakernel] (kernels/megakernel_packed.cuh).

// The modules with the kernels, for each shape of blocks, and the prefixes of their names.
var packedUnits = [...]struct{ unit, prefix string }{optShape: {"megakernel_packed", "megakernel_packed_"}, llamaShape: {"megakernel_packed_llama", "megakernel_packed_llama_"}}

// packedDims are the head dims with kernels, and packedRows is the largest number of rows of x.
var packedDims = [...]int{64, 128}

const packedRows = 2

const (
	packedMaps = 2 // of a part: elements, and scales with zeros or minima; as many of a last tile with fewer rows
	packedRuns = decodeColumns / 32
)

// packedLayer is the format of a layer's weights, which all parts share.
type packedLayer struct {
	of     *weight.Packed
	chunks int // of 128 columns
	groups int // of 128 columns; 0: a scale is a row's
	deep   int // blocks of 128 columns of a slot
	plane  int // bytes of a slot's scales
	second int // bytes of zeros or minima, which lie behind the scales
}

// newPackedLayer returns nil if no megakernel reads such weights: super-blocks, other orders of columns, groups of more than 128
// columns, parts of several formats, parts that begin within 256 rows.
func newPackedLayer(o *Linear) *packedLayer {
	w := o.Parts[0].Packed
	for i := range o.Parts {
		p := o.Parts[i].Packed
		if p == nil || p.Super || p.Order > 0 || p.Kernels != w.Kernels || p.Group != w.Group || p.Kind != w.Kind || p.Zero != w.Zero || p.Factor != w.Factor || o.Parts[i].First%narrowTile != 0 {
			return nil
		}
	}
	l := &packedLayer{of: w, chunks: decodeColumns / w.Width()}
	switch w.Group {
	case 0:
	case 32, 64, decodeColumns:
		l.groups = decodeColumns / w.Group
	default:
		return nil
	}
	for l.deep = decodeBox / (512 * l.chunks); mostBoxes(o.In, 1)%l.deep != 0; {
		l.deep--
	}
	l.plane = max(l.deep*l.groups, 1) * decodeTile * w.Factor
	if w.Kind != weight.PackedScales {
		l.second = l.plane
	}
	return l
}

// pitch returns the bytes of a slot's scales, and zeros or minima.
func (l *packedLayer) pitch() int { return attn.Ceil(l.plane+l.second, 128) * 128 }

// shift returns log2 of the 32 columns of a group, at most 2.
func (l *packedLayer) shift() int32 {
	switch l.groups {
	case packedRuns:
		return 0
	case packedRuns / 2:
		return 1
	}
	return 2
}

// packing has the sizes that weights of 8 and 4 bits add to a megakernel.
type packing struct {
	any   bool
	pitch int // bytes of a slot's scales, in all layers
	maps  int
}

func (p packing) with(l *packedLayer) packing {
	return packing{true, max(p.pitch, l.pitch()), p.maps + mostParts*2*packedMaps}
}

// feed returns the size of a layer's feed.
func (p *packing) feed() int {
	if p.any {
		return int(unsafe.Sizeof(packedFeed{}))
	}
	return int(unsafe.Sizeof(decodeFeed{}))
}

// slot returns the size of a slot of a warp's ring.
func (p *packing) slot() int { return decodeBox + 8 + p.pitch }

// aligned returns the most bytes that the alignment of the scales costs.
func (p *packing) aligned() int {
	if p.any {
		return 128
	}
	return 0
}

// packedFeed is struct DecodePackedFeed.
type packedFeed struct {
	decodeFeed
	full                    [mostParts]uint16
	deep, bytes, all, pitch uint16
	chunks, groups          uint8
}

// decodePacked is struct DecodePacked.
type decodePacked struct {
	decodeLinear
	deep, runs, factor, plane, behind, kind, zero, e4m3 int32
	magic                                               uint32
}

// writeFeed writes a layer's feed and, with packed weights, the rest of the layer. maps is the address of the maps of packed weights.
func (c *Megakernel) writeFeed(t *decodeLayer, p *megakernelLayer, feed decodeFeed, maps uint64) error {
	if !c.packing.any {
		c.feeds = append(c.feeds, gpu.BytesOf([]decodeFeed{feed})...)
		return nil
	}
	f := packedFeed{decodeFeed: feed, pitch: uint16(c.packing.pitch)}
	if l := p.packed; l != nil {
		w := l.of
		x := (*decodePacked)(unsafe.Pointer(&t.body))
		x.deep, x.runs, x.factor, x.behind, x.kind, x.zero, x.magic = int32(l.deep), l.shift(), int32(w.Factor), int32(l.second), int32(w.Kind), w.Zero, narrowMagic
		x.plane = int32(l.groups * decodeTile * w.Factor)
		t.kind = eightKind
		if w.Format == weight.E4M3 {
			t.kind, x.e4m3 = e4m3Kind, 1
		} else if w.Kernels == "int4" {
			t.kind = fourKind
		}
		f.maps = maps + uint64(len(c.maps))*uint64(unsafe.Sizeof(cuda.TensorMap{}))
		f.deep, f.all, f.chunks, f.groups = uint16(l.deep), uint16(w.Groups), uint8(l.chunks), uint8(l.groups)
		f.bytes = uint16(l.deep*l.chunks*512 + l.plane + l.second)
		var all [mostParts * 2 * packedMaps]cuda.TensorMap
		for j := range p.weights {
			part := &p.weights[j]
			f.full[j] = uint16((part.Packed.Rows - part.First) / narrowTile)
			for k := range 2 * packedMaps {
				var err error
				if all[j*2*packedMaps+k], err = c.d.packedMap(part, l, k%packedMaps, k >= packedMaps); err != nil {
					return err
				}
			}
		}
		c.maps = append(c.maps, all[:]...)
	}
	c.feeds = append(c.feeds, gpu.BytesOf([]packedFeed{f})...)
	return nil
}

// packedMap returns the map of a plane of a part's tiles of 256 rows or, with last, of its last tile with fewer rows; an empty map if there
// is none.
func (d *Engine) packedMap(part *LinearPart, l *packedLayer, plane int, last bool) (m cuda.TensorMap, err error) {
	w := part.Packed
	full, rest := (w.Rows-part.First)/narrowTile, (w.Rows-part.First)%narrowTile
	from, tiles, rows := part.First, full, narrowTile
	if last {
		from, tiles, rows = part.First+full*narrowTile, 1, attn.Ceil(rest, decodeTile)*decodeTile
	}
	if tiles == 0 || rows == 0 {
		return m, nil
	}
	at, t := 0, cuda.Tiles{ElementBytes: 4, Plain: true}
	if plane == 0 { // words of a chunk, chunks, tiles
		at = from * w.Chunks * 32
		t.Dims = [3]uint64{uint64(rows * 8), uint64(w.Chunks), uint64(tiles)}
		t.Strides = [2]uint64{uint64(rows * 32), uint64(rows * 32 * w.Chunks)}
		t.Box = [3]uint32{decodeTile * 8, uint32(l.deep * l.chunks), 1}
	} else { // scales of a group, groups of all tiles, planes
		at = w.Scales + from*w.Groups*w.Factor
		t.ElementBytes = w.Factor
		t.Dims = [3]uint64{uint64(rows), uint64(tiles * w.Groups), 1}
		t.Strides = [2]uint64{uint64(rows * w.Factor), uint64(w.Second - w.Scales)}
		t.Box = [3]uint32{decodeTile, uint32(max(l.deep*l.groups, 1)), 1}
		if w.Second > 0 {
			t.Dims[2], t.Box[2] = 2, 2
		} else {
			t.Strides[1] = t.Strides[0] * t.Dims[1]
		}
	}
	key := linearMap{address: part.W.Address() + uint64(at), in: int(t.Strides[1]), out: int(t.Dims[1]), box: int(t.Box[1]), deep: rows * t.ElementBytes, parts: -tiles, padded: plane * int(t.Box[2])}
	return d.maps.Get(key, func() (cuda.TensorMap, error) { return d.dev.TensorMap(part.W.Buffer, part.W.Offset+int64(at), t) })
}
