// Package pages keeps the page tables of a cache's sequences, and counts the holders of each page. It has integers only: no
// memory, no locks, no devices.
//
// A page is a number in [0, Count). A sequence has a page table: token j is in page
// Pages[j/Size], as in PagedAttention (Kwon et al., arXiv:2309.06180). Each page has a
// number of holders, and a page without holders is free. Sequences share pages, and a shared page is never written: an append to a
// shared page writes a copy (copy on write).
//
// Pages can be in several shards, such as the memories of GPUs. The pages of a sequence are then in the shards in turn.
//
// A table can drop tokens that no query will read. It then has a gap, and the pages in the gap are released. So a sequence with a
// window has a bounded number of pages.
//
// An append is a transaction. Reserve takes the pages of the new tokens, and leaves the table unchanged. Commit puts the pages into the
// table. Rollback frees the pages.
//
// A call that returns an error changes nothing.
package pages
