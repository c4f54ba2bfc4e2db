package kvstore

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/queue"
)

// queue queues the work of a layer. The operands are on the first member. The other members read and write the parts of their heads
// there.
func (p *DevicePlan) queue(sub *queue.Submission, layer int, n newRows, o *ongpu.AttentionOperands) error {
	if len(p.now.parts) == 1 {
		o.Pages = p.layerPages(0, layer)
		return p.now.parts[0].queueAlone(sub, n, o)
	}
	if p.now.context != nil {
		return p.queueByContext(sub, layer, n, o)
	}
	p.lay(false)
	return sub.Each(func(i int, sub *queue.Submission) error {
		part, g := &p.now.parts[i], &p.geometry
		heads := p.pages.Parts[i].heads
		mine := heads.Operands(g, o)
		mine.Pages = p.layerPages(i, layer)
		rows := newRows{k: ongpu.From(n.k, heads.First*g.Dim), v: ongpu.From(n.v, heads.First*g.ValueDim)}
		if p.turns() {
			first, _ := heads.Queries(g)
			rows.rotated = ongpu.From(n.rotated, first*g.Query.Head)
		}
		return sub.Do(func(s *cuda.Stream) error {
			if err := rows.appendTo(part.plan, s, &mine, g.KVHeads); err != nil {
				return err
			}
			return part.plan.Run(s, &mine)
		})
	})
}

// layerPages returns the pages of a layer on a member.
func (p *DevicePlan) layerPages(member, layer int) (pages attention.Pages) {
	part := p.pages.Parts[member]
	for s := range p.pages.config.Format.Slabs {
		b := *part.Layers[layer].At(s)
		*pages.At(s) = ongpu.Mem{Buffer: b, DType: s.DType, Len: int(b.Len()) / s.DType.Size()}
	}
	for i := range p.pages.config.Format.ScaledByHead {
		b := part.Layers[layer][i].Scales
		pages[i].Scales = ongpu.Mem{Buffer: b, DType: attn.Float32, Len: int(b.Len()) / 4}
	}
	return pages
}
