package hf

import (
	"cmp"
	"encoding/json"
	"errors"
	"path/filepath"
	"strconv"
	"strings"

	"gorgonia.org/leanattention/decoder/internal/files"
)

// indexLimits allows an index of a million weights.
var indexLimits = files.Limits{Values: 1 << 20, Depth: 1}

// parseIndex reads the index of a sharded checkpoint,
//
//	{"weight_map": {"name": "shard file", ...}, ...}
//
// and returns its weight_map. A shard must be a plain file name.
func parseIndex(file string, data []byte) (map[string]string, error) {
	fields, err := object(file, data)
	if err != nil {
		return nil, err
	}
	raw := fields["weight_map"]
	if err := indexLimits.Check(raw); err != nil {
		return nil, fail(ErrFormat, file, "weight_map: %v", err)
	}
	var shardOf map[string]string
	if err := json.Unmarshal(raw, &shardOf); raw != nil && err != nil {
		return nil, fail(ErrFormat, file, "weight_map: %v", err)
	}
	if len(shardOf) == 0 {
		return nil, fail(ErrFormat, file, "no weight_map, or an empty one")
	}
	for name, shard := range shardOf {
		// IsLocal also detects the names of devices on Windows. Later errors have the shard's name unquoted, as part of
		// a path.
		if strings.ContainsAny(shard, `/\:`) || strings.ContainsFunc(shard, func(r rune) bool { return !strconv.IsGraphic(r) }) || !filepath.IsLocal(shard) || shard == "." {
			return nil, fail(ErrFormat, file, "weight %s lies in %s, which is not the name of a file of the folder", quote(name), quote(shard))
		}
	}
	return shardOf, nil
}

// canonical returns a weight's name without the prefix "model.".
func canonical(name string) string { return strings.TrimPrefix(name, "model.") }

// objectLimits are the limits of an index as a whole. indexLimits are those of its weight_map.
var objectLimits = files.Limits{Values: 2 << 20, Depth: 64, Nulls: true}

// object reads a JSON object.
func object(file string, data []byte) (fields map[string]json.RawMessage, err error) {
	if err := cmp.Or(objectLimits.Check(data), json.Unmarshal(data, &fields)); err != nil || fields == nil {
		return nil, fail(ErrFormat, file, "not a JSON object: %v", cmp.Or(err, errors.New("null")))
	}
	return fields, nil
}
