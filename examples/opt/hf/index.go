package hf

import (
	"encoding/json"
	"path/filepath"
	"strconv"
	"strings"
)

// parseIndex reads the index of a sharded checkpoint,
//
//	{"weight_map": {"name": "shard file", ...}, ...}
//
// and returns its weight_map. A shard must be a plain file name.
func parseIndex(file string, data []byte) (map[string]string, error) {
	var index struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(data, &index); err != nil {
		return nil, fail(ErrFormat, file, "%v", err)
	}
	if len(index.WeightMap) == 0 {
		return nil, fail(ErrFormat, file, "no weight_map, or an empty one")
	}
	for name, shard := range index.WeightMap {
		// IsLocal also knows the names that are devices on Windows.
		// Errors have the name unquoted, as part of a path.
		if strings.ContainsAny(shard, `/\:`) || strings.ContainsFunc(shard, func(r rune) bool { return !strconv.IsGraphic(r) }) || !filepath.IsLocal(shard) || shard == "." {
			return nil, fail(ErrFormat, file, "weight %s lies in %s, which is not the name of a file of the folder", quote(name), quote(shard))
		}
	}
	return index.WeightMap, nil
}

// canonical gives a weight the name that callers use, from whatever prefix a
// folder has put before it.
func canonical(name string) string {
	name = strings.TrimPrefix(name, "model.")
	if strings.HasPrefix(name, "decoder.") || strings.HasPrefix(name, "lm_head.") {
		return name
	}
	return "decoder." + name
}
