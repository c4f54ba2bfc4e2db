package hf

import (
	"bytes"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"
)

// buffers are suffixes of the names of tensors that are not parameters: tables and masks computed from the
// configuration, and the version of the program that wrote the checkpoint.
var buffers = []string{".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", "decoder.version"}

func isBuffer(name string) bool {
	return slices.ContainsFunc(buffers, func(b string) bool { return strings.HasSuffix("."+name, "."+strings.TrimPrefix(b, ".")) })
}

// unused lists the tensors that are not weights of the model, and returns the path of their file or folder. used has
// the canonical names of the weights.
func (f *Folder) unused(used map[string]bool) (list, where string, err error) {
	var rest []entry
	for name, e := range f.weights {
		if !used[name] && !isBuffer(e.name) {
			rest = append(rest, e)
		}
	}
	for _, e := range f.copies {
		if isBuffer(e.name) {
			continue
		}
		weight := canonical(e.name)
		same := false
		if w := f.weights[weight]; used[weight] {
			if same, err = w.same(&e); err != nil {
				return "", "", err
			}
		}
		if !same {
			rest = append(rest, e)
		}
	}
	if len(rest) == 0 {
		return "", "", nil
	}
	const most = 8
	slices.SortFunc(rest, func(a, b entry) int { return strings.Compare(a.name, b.name) })
	where = rest[0].file
	if slices.ContainsFunc(rest, func(e entry) bool { return e.file != where }) {
		where = f.dir
	}
	var names []string
	for _, e := range rest[:min(len(rest), most)] {
		names = append(names, quote(e.name))
	}
	list = fmt.Sprintf("%d tensors that the model of config.json does not use: %s", len(rest), strings.Join(names, ", "))
	if len(rest) > most {
		list += fmt.Sprintf(" and %d more", len(rest)-most)
	}
	if slices.ContainsFunc(rest, func(e entry) bool { return strings.Contains(e.name, "lora_") }) {
		list += " (an adapter has to be merged into the weights first)"
	}
	return list, where, nil
}

// same reports whether two tensors have the same type, shape and bits.
func (e *entry) same(o *entry) (same bool, err error) {
	err = reading(e.file, func() error {
		switch {
		case e.dtype != o.dtype || !slices.Equal(e.shape, o.shape):
		case e.stride == nil && o.stride == nil:
			same = bytes.Equal(e.data, o.data)
		default:
			same = e.dtype.widens() && slices.EqualFunc(e.float32s(), o.float32s(), func(a, b float32) bool { return math.Float32bits(a) == math.Float32bits(b) })
		}
		return nil
	})
	return same, err
}

// shardName matches the part of a shard's name that transformers adds to the name of a checkpoint.
var shardName = regexp.MustCompile(`-[0-9]{5,}-of-[0-9]{5,}\.`)

// allShards returns an error for a file that is named like a shard of the checkpoint and is not in the index. shards
// has the names in the index, sorted.
func (f *Folder) allShards(index, whole string, names, shards []string) error {
	stem, extension, _ := strings.Cut(whole, ".")
	for _, name := range names {
		middle, ok := strings.CutPrefix(name, stem)
		if _, listed := slices.BinarySearch(shards, name); !ok || listed {
			continue
		}
		if at := shardName.FindStringIndex(middle); at != nil && at[0] == 0 && middle[at[1]:] == extension {
			return fail(ErrUnsupported, f.in.path(name), "a shard that %s does not list, which would be left out: it belongs into the index, or into another folder", quote(index))
		}
	}
	return nil
}
